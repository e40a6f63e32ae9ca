// SPDX-License-Identifier: Apache-2.0
//! Faults of cards as the command tells them: who is at fault, what every card was waiting for, how to go on.

use std::fmt::Write;

use spanker_runtime::SpankerControl;
use spanker_scheduler::device::DeviceErrorKind;
use spanker_scheduler::{DeviceError, Error, Topology};

use crate::directory;

/// The whole story of an error.
pub(crate) fn told(cards: &Topology<SpankerControl>, error: DeviceError) -> anyhow::Error {
    let mut text = error.to_string();
    for (card, words) in error.waiting() {
        // Writing to a string does not fail.
        let _ = write!(text, "\n  card {card}: {words}");
    }
    let kind = error.kind();
    let left = cards.survivors(&Error::Device(error));
    let all = left.len() == cards.indices().len();
    text += &match kind {
        DeviceErrorKind::LinkDown if all => {
            "\nhint: the cards still reach each other without it: run the same again".to_owned()
        }
        DeviceErrorKind::Busy => "\nhint: 'spanker cards' shows the process that has it".to_owned(),
        DeviceErrorKind::Unreachable => {
            format!("\nhint: these reach each other: --cards {}", directory::list(&left))
        }
        _ if all => String::new(),
        _ => directory::go_on(&left),
    };
    anyhow::Error::msg(text)
}

/// How long cards may be silent, as flags give it.
pub(crate) fn detect(text: &str) -> Result<std::time::Duration, String> {
    let seconds: spanker_topology::Seconds =
        text.parse().map_err(|_| "expected a time, as in 300ms or 2s".to_owned())?;
    match std::time::Duration::try_from_secs_f64(seconds.0) {
        Ok(time) if (0.01..=600.0).contains(&seconds.0) => Ok(time),
        _ => Err("expected 10ms to 600s".into()),
    }
}
