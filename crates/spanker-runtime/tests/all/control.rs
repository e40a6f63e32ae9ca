// SPDX-License-Identifier: Apache-2.0
//! The control handle against files that are no card and against a preloaded fake driver. A real
//! card is not needed here; `real_card.rs` asks one when it is there.

use std::env;
use std::error::Error as _;
use std::io::ErrorKind;
use std::process::Command;

use nix::errno::Errno;
use spanker_runtime::{AbiVersion, Error, SpankerControl};

use crate::cc;

/// Set in the child process that runs under the fake driver.
const CHILD: &str = "SPANKER_FAKE_CHILD";

/// Runs `body` in a child process whose `ioctl` is the fake's, and hands it an open handle.
///
/// The child is this test binary, told to run only the test `name`, which reaches this function
/// again and sees that it is the child. `errno` makes the fake fail every request.
fn under_fake_driver(name: &str, errno: Option<Errno>, body: impl FnOnce(&SpankerControl)) {
    if let Some(path) = env::var_os(CHILD) {
        body(&SpankerControl::open_path(path).expect("the stand-in for the device opens"));
        println!("{name}: checked under the fake driver");
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let device = folder.path().join("device");
    std::fs::write(&device, "").expect("a stand-in for the device");
    let fake = folder.path().join("fake_ioctl.so");
    cc::compile("fake_ioctl.c", &fake, &["-shared", "-fPIC"]);

    let mut child = Command::new(env::current_exe().expect("this test binary"));
    child.args(["--exact", &format!("control::{name}"), "--nocapture"]);
    child.env(CHILD, &device).env("LD_PRELOAD", &fake);
    if let Some(errno) = errno {
        child.env("SPANKER_FAKE_ERRNO", (errno as i32).to_string());
    }
    let run = child.output().expect("the child runs");
    let said = String::from_utf8_lossy(&run.stdout);
    // A child that matched no test also ends well, hence the look at its words.
    assert!(
        run.status.success() && said.contains("checked under the fake driver"),
        "the child ends with {}: {said}{}",
        run.status,
        String::from_utf8_lossy(&run.stderr)
    );
}

/// The name and the `errno` of a failed request.
fn ioctl_failure<T: std::fmt::Debug>(result: spanker_runtime::Result<T>) -> (&'static str, Errno) {
    match result {
        Err(Error::Ioctl { op, source }) => (op, source),
        other => panic!("expected a failed ioctl, got {other:?}"),
    }
}

#[test]
fn open_path_of_missing_device_names_path_and_cause() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("spanker7");
    let error = SpankerControl::open_path(&missing).expect_err("nothing is there");
    assert_eq!(error.to_string(), format!("cannot open {}", missing.display()));
    assert!(error.source().is_some());
    match error {
        Error::Open { path, source } => {
            assert_eq!(path, missing);
            assert_eq!(source.kind(), ErrorKind::NotFound);
        }
        other => panic!("expected a failed open, got {other:?}"),
    }
}

#[test]
fn requests_to_regular_file_fail_with_enotty_and_name_the_request() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let card = SpankerControl::open_path(file.path()).expect("a regular file opens");
    assert_eq!(ioctl_failure(card.ping()), ("PING", Errno::ENOTTY));
    assert_eq!(ioctl_failure(card.version()), ("GET_VERSION", Errno::ENOTTY));
    let error = card.version().expect_err("a regular file is no card");
    assert_eq!(error.to_string(), "ioctl GET_VERSION failed");
    assert!(error.source().is_some());
}

#[test]
fn requests_to_answering_driver_return_its_version() {
    let name = "requests_to_answering_driver_return_its_version";
    under_fake_driver(name, None, |card| {
        card.ping().expect("the fake answers");
        let version = card.version().expect("the fake answers");
        assert_eq!(version, AbiVersion { major: 7, minor: 8, patch: 9 });
    });
}

#[test]
fn requests_to_failing_driver_carry_its_errno() {
    let name = "requests_to_failing_driver_carry_its_errno";
    under_fake_driver(name, Some(Errno::EIO), |card| {
        assert_eq!(ioctl_failure(card.ping()), ("PING", Errno::EIO));
        assert_eq!(ioctl_failure(card.version()), ("GET_VERSION", Errno::EIO));
    });
}

#[test]
fn requests_from_many_threads_to_one_handle_all_succeed() {
    let name = "requests_from_many_threads_to_one_handle_all_succeed";
    under_fake_driver(name, None, |card| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        card.ping().expect("the fake answers");
                        assert_eq!(card.version().expect("the fake answers").minor, 8);
                    }
                });
            }
        });
    });
}

#[test]
fn requests_of_this_version_to_another_major_version_are_not_made() {
    let name = "requests_of_this_version_to_another_major_version_are_not_made";
    under_fake_driver(name, None, |card| {
        let theirs = AbiVersion { major: 7, minor: 8, patch: 9 };
        for error in [card.info().err(), card.allocate(1).err(), card.counters().err()] {
            match error {
                Some(Error::Version { theirs: found }) => assert_eq!(found, theirs),
                other => panic!("expected another version, got {other:?}"),
            }
        }
        let error = card.info().expect_err("another version");
        assert_eq!(error.to_string(), "the card speaks ABI 7.8.9, this program 0.5.0");
    });
}
