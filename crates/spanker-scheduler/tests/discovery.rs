// SPDX-License-Identifier: Apache-2.0
//! What discovery makes of cards that do not answer questions about themselves: `ENOTTY` alone means a card
//! without link discovery, and everything else is an error that says which card, where, and what was asked.

use std::time::Duration;

use bytemuck::{Pod, bytes_of};
use nix::errno::Errno;
use spanker_runtime::abi::{RawCardInfo, RawPortInfo, RawVersion};
use spanker_runtime::{
    ABI_VERSION_MAJOR, ABI_VERSION_MINOR, AbiVersion, Call, Feature, SpankerControl, Transport,
};
use spanker_scheduler::{DeviceErrorKind, Error, Topology, is_without_discovery, survey};
use spanker_test_support::cards::Cards;

/// How a card answers one of the requests of discovery. It answers the others as it should.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Refusal(&'static str, Errno),
    Gone(&'static str),
    Late(&'static str),
    Garbage(&'static str),
    Version(u16, u16),
    Ports(u32),
    AnotherPort,
}

/// A card with one port that leads nowhere.
#[derive(Debug)]
struct Fake(Answer);

fn put<T: Pod>(call: &mut Call<'_>, raw: T) {
    call.argument.copy_from_slice(bytes_of(&raw));
}

impl Transport for Fake {
    fn call(&self, call: &mut Call<'_>) -> spanker_runtime::Result<()> {
        use spanker_runtime::Error::{Gone, Ioctl, Nonsense, Unresponsive};
        let (op, waited) = (call.name, call.timeout);
        match self.0 {
            Answer::Refusal(at, source) if at == op => return Err(Ioctl { op, source }),
            Answer::Gone(at) if at == op => return Err(Gone { op }),
            Answer::Late(at) if at == op => return Err(Unresponsive { op, waited }),
            Answer::Garbage(at) if at == op => {
                return Err(Nonsense { op, what: "it begins with 00000000".into() });
            }
            _ => {}
        }
        let (major, minor) = match self.0 {
            Answer::Version(major, minor) => (major, minor),
            _ => (ABI_VERSION_MAJOR, ABI_VERSION_MINOR),
        };
        let ports = if let Answer::Ports(ports) = self.0 { ports } else { 1 };
        let port = if let Answer::AnotherPort = self.0 { 3 } else { 0 };
        match op {
            "GET_VERSION" => put(call, RawVersion { major, minor, ..RawVersion::default() }),
            "CARD_INFO" => put(call, RawCardInfo { serial: 7, ports, ..RawCardInfo::default() }),
            "PORT_INFO" => put(call, RawPortInfo { port, ..RawPortInfo::default() }),
            _ => return Err(Ioctl { op, source: Errno::ENOTTY }),
        }
        Ok(())
    }
}

fn discovered(answer: Answer) -> Result<Topology<SpankerControl>, Error> {
    Topology::of_cards(vec![SpankerControl::over(Box::new(Fake(answer)))])
}

const QUESTIONS: [&str; 3] = ["GET_VERSION", "CARD_INFO", "PORT_INFO"];

const ERRORS: [Errno; 14] = [
    Errno::EIO,
    Errno::EPERM,
    Errno::EACCES,
    Errno::EINVAL,
    Errno::ENODEV,
    Errno::ENXIO,
    Errno::EBUSY,
    Errno::EAGAIN,
    Errno::EINTR,
    Errno::ETIMEDOUT,
    Errno::ENOSYS,
    Errno::EOPNOTSUPP,
    Errno::EPROTO,
    Errno::ENOMEM,
];

#[test]
fn card_that_does_not_know_a_question_has_no_links() {
    for op in QUESTIONS {
        let found = discovered(Answer::Refusal(op, Errno::ENOTTY)).unwrap();
        assert_eq!((found.n_sails(), found.links().len()), (1, 0));
    }
}

#[test]
fn card_of_a_version_without_discovery_is_not_asked_and_has_no_links() {
    for minor in 0..=ABI_VERSION_MINOR + 1 {
        let found = discovered(Answer::Version(0, minor)).unwrap();
        assert_eq!((found.n_sails(), found.links().len()), (1, 0), "0.{minor}");
        // It would answer; but nobody knows what a card means by an answer that its version does not have.
        let asked = found.group().err().map(|error| error.to_string());
        let refused = format!("card 0: request STATE needs ABI 0.2.0, the card speaks 0.{minor}.0");
        assert_eq!(asked == Some(refused), minor < 2, "0.{minor}: {asked:?}");
    }
}

#[test]
fn card_that_refuses_a_question_for_any_other_reason_is_an_error_with_the_question() {
    for (op, errno) in QUESTIONS.into_iter().flat_map(|op| ERRORS.map(|errno| (op, errno))) {
        let error = discovered(Answer::Refusal(op, errno)).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("card 0") && text.contains(op), "{errno}: {text}");
        let said = if errno == Errno::EBUSY { "at work" } else { errno.desc() };
        assert!(text.contains(said), "{errno}: {text}");
    }
}

#[test]
fn card_that_is_gone_late_or_answers_nonsense_is_an_error_with_the_question() {
    use DeviceErrorKind::{Lost, Refused, Stuck, Wrong};
    for op in QUESTIONS {
        let cases =
            [(Answer::Gone(op), Lost), (Answer::Late(op), Stuck), (Answer::Garbage(op), Wrong)];
        for (answer, kind) in cases {
            let error = discovered(answer).unwrap_err();
            let Error::Device(device) = &error else { panic!("{error}") };
            assert_eq!((device.kind(), device.card()), (kind, Some(0)));
            assert!(error.to_string().contains(op), "{error}");
        }
    }
    let cases = [
        (Answer::Ports(257), Wrong),
        (Answer::AnotherPort, Wrong),
        (Answer::Version(1, 0), Refused),
    ];
    for (answer, kind) in cases {
        let error = discovered(answer).unwrap_err();
        let Error::Device(device) = &error else { panic!("{error}") };
        assert_eq!((device.kind(), device.card()), (kind, Some(0)), "{error}");
    }
    let error = discovered(Answer::Version(1, 0)).unwrap_err();
    assert!(error.to_string().starts_with("card 0: the card speaks ABI 1.0.0"), "{error}");
    let error = discovered(Answer::Ports(257)).unwrap_err();
    assert!(
        error.to_string().ends_with("CARD_INFO is nonsense: 257 ports, at most 256"),
        "{error}"
    );
}

#[test]
fn card_behind_a_socket_that_refuses_a_question_is_named_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let cards = Cards::ring(3);
    cards.serve(folder.path());
    let path = folder.path().join("spanker1");
    for op in QUESTIONS {
        cards.refuse(1, op, Errno::ENOTTY);
        let found = Topology::enumerate_in(folder.path()).unwrap();
        assert_eq!((found.n_sails(), found.links().len()), (3, 2), "{op}");
        for errno in [Errno::EIO, Errno::EPERM, Errno::EINVAL] {
            cards.refuse(1, op, errno);
            let error = Topology::enumerate_in(folder.path()).unwrap_err();
            let (place, why) = (path.display(), errno.desc());
            assert_eq!(error.to_string(), format!("card 1: {op} refused ({why}) at {place}"));
            let error = Topology::open_cards(folder.path(), &[0, 1]).unwrap_err();
            assert!(error.to_string().contains("spanker1"), "{error}");
            // The others are found all the same.
            let surveyed = survey(folder.path());
            let answers: Vec<bool> = surveyed.iter().map(|card| card.card.is_ok()).collect();
            assert_eq!(answers, [true, false, true]);
            assert!(!is_without_discovery(surveyed[1].card.as_ref().unwrap_err()));
        }
    }
}

#[test]
fn only_enotty_and_an_old_version_are_a_card_without_link_discovery() {
    use spanker_runtime::Error as Runtime;
    let op = "CARD_INFO";
    let theirs = AbiVersion { major: 0, minor: 1, patch: 0 };
    for &feature in Feature::ALL {
        let asks = matches!(feature, Feature::CardInfo | Feature::PortInfo);
        assert_eq!(is_without_discovery(&Runtime::Unsupported { feature, theirs }), asks);
    }
    assert!(!is_without_discovery(&Runtime::Version { theirs }));
    assert!(is_without_discovery(&Runtime::Ioctl { op, source: Errno::ENOTTY }));
    for source in ERRORS {
        assert!(!is_without_discovery(&Runtime::Ioctl { op, source }));
    }
    assert!(!is_without_discovery(&Runtime::Gone { op }));
    assert!(!is_without_discovery(&Runtime::Unresponsive { op, waited: Duration::ZERO }));
}
