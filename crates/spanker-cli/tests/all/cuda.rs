// SPDX-License-Identifier: Apache-2.0
//! Commands for GPUs on machines that have none: what they refuse, and what they say to do. Where there is a GPU,
//! `spanker bench all-reduce --fabric cuda --check` is the test.

use std::process::{Command, Output};

fn spanker(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spanker"));
    command.env_remove("SPANKER_DEV_DIR").env("XDG_RUNTIME_DIR", "/nowhere");
    command.args(args).output().expect("the command starts")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn without_a_gpu_every_command_says_what_to_install() {
    let driver = spanker_cuda::gpu_count();
    for args in [
        &["probe", "--fabric", "cuda"][..],
        &["bench", "all-reduce", "--fabric", "cuda", "--sizes", "1M"],
        &["bench", "all-reduce", "--fabric", "cuda", "--algorithm", "native"],
        &["bench", "all-reduce", "--fabric", "cuda", "--check"],
    ] {
        if driver.is_err() {
            let output = spanker(args);
            assert_eq!(output.status.code(), Some(1), "{args:?}");
            let said = errors(&output);
            assert!(said.contains("hint: "), "{args:?}: {said}");
            assert!(output.stdout.is_empty(), "{args:?} printed before it failed");
        }
    }
    // A machine with a GPU has something to count.
    assert!(driver.is_err() || driver.is_ok_and(|count| count > 0));
}

#[test]
fn flags_that_gpus_have_not_are_usage_errors() {
    let bench = ["bench", "all-reduce", "--fabric", "cuda"];
    let cases: [(&[&str], &str); 7] = [
        (&["--threads", "2"], "--threads"),
        (&["--algorithm", "ring"], "fused and native"),
        (&["--cards", "0"], "--cards 0"),
        (&["--cards", "0,1"], "not a list"),
        (&["--cards", "2", "--root", "2"], "--root"),
        (&["--op", "or"], "--op or is not defined"),
        (&["--sizes", "2"], "less than one element"),
    ];
    for (more, named) in cases {
        let args = [&bench[..], more].concat();
        let output = spanker(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(named), "{args:?}: {}", errors(&output));
    }
    for (args, named) in [
        (&["bench", "broadcast", "--fabric", "cuda"][..], "all-reduce and reduce"),
        (&["bench", "gather", "--fabric", "cuda", "--algorithm", "native"], "NCCL is used for"),
        (&["bench", "all-reduce", "--check"], "--check is for --fabric cuda"),
        (
            &["bench", "all-reduce", "--algorithm", "native"],
            "native is for --fabric mpi and --fabric cuda",
        ),
        (&["probe", "--gpus", "2"], "are for --fabric cuda"),
        (&["probe", "--fabric", "cuda", "--cards", "2"], "--cards is for"),
    ] {
        let output = spanker(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(named), "{args:?}: {}", errors(&output));
    }
}
