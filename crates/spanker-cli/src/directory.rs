// SPDX-License-Identifier: Apache-2.0
//! Which cards a flag means, with errors as the command tells them.

use std::path::Path;

use spanker_engine::EngineError;
use spanker_runtime::SpankerControl;
use spanker_scheduler::Topology;

pub(crate) use spanker_engine::CardList;
pub(crate) use spanker_engine::directory::{
    HINT, alive, chosen, find, first, kind, list, nature, open, pace, reason,
};

/// The card that is dead, where an error only says that one is.
pub(crate) fn blamed(
    folder: &Path,
    indices: &[usize],
    error: impl Into<anyhow::Error>,
) -> anyhow::Error {
    let indices = CardList::Indices(indices.to_vec());
    chosen(folder, Some(&indices)).err().map_or_else(|| error.into(), EngineError::into)
}

/// A line of advice: the cards to go on with, if there are enough.
pub(crate) fn go_on(left: &[usize]) -> String {
    spanker_engine::directory::go_on(left)
        .map_or_else(String::new, |hint| format!("\nhint: {hint}"))
}

/// The whole story of a fault of cards.
pub(crate) fn explained(
    cards: &Topology<SpankerControl>,
    error: spanker_scheduler::DeviceError,
) -> anyhow::Error {
    spanker_engine::explain(cards, error).into()
}
