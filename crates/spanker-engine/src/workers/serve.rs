// SPDX-License-Identifier: Apache-2.0
//! What a worker does in a group, whatever connects it: it takes the model that the leader offers, and then does what the
//! leader says until that is over.

use std::time::Duration;

use spanker_fabric::Fabric;
use spanker_llm::{LlmError, Worker, run_worker};

use super::offer::{self, Shelf, Source, Taken};

/// How long a worker waits for an order of its leader at the least. A leader that has died is noticed before.
const ORDER_TIMEOUT: Duration = Duration::from_secs(60);

/// What came of a group on a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Served {
    /// What the leader calls the model.
    pub(crate) model: String,
    /// Whether it was a file of this worker's own.
    pub(crate) is_own: bool,
    /// Bytes of it that came over the network.
    pub(crate) fetched: u64,
}

/// Serves one group on this end of a fabric; `opened` hears of the model when it is open.
pub(crate) fn serve(
    fabric: &mut dyn Fabric,
    shelf: &Shelf,
    threads: usize,
    opened: &dyn Fn(&Served),
) -> (Option<Served>, Result<(), LlmError>) {
    let Taken { offer, network, source } = match offer::take(fabric, shelf) {
        Ok(taken) => taken,
        Err(error) => return (None, Err(error)),
    };
    let served = || Served {
        model: offer.name.clone(),
        is_own: matches!(source, Source::File { .. }),
        fetched: source.fetched(),
    };
    opened(&served());
    let timeout = offer.timeout();
    let worker = Worker {
        network: &network,
        store: Some(&source),
        plan: None,
        threads,
        timeout,
        order_timeout: timeout.max(ORDER_TIMEOUT),
    };
    let outcome = run_worker(fabric, &worker);
    (Some(served()), outcome)
}
