// SPDX-License-Identifier: Apache-2.0
//! Cards as backends: where they are, and what to say about those that are not there, dead or at work for others.

use std::sync::Arc;
use std::time::Duration;

use spanker_jobs::{CardProduct, JobError, Product, Replica};
use spanker_llm::LlmError;
use spanker_runtime::SpankerControl;
use spanker_scheduler::{Deadline, DeviceErrorKind, survey};
use spanker_steal::{Backend, Failure};

use super::questions::Questions;
use crate::directory;

/// How long a card may show no progress. The others have its items long before.
const DEADLINE: Deadline =
    Deadline { detect: Duration::from_secs(5), total: Duration::from_secs(3600), slow_after: None };
/// What to do about a card that is at work for another program.
const BUSY: &str = "\nhint: 'spanker cards' shows the process that has it";

/// Opens a card of the folder where `spanker cards` looks.
fn open(index: usize) -> anyhow::Result<SpankerControl> {
    let folder = directory::find();
    let mut cards = survey(&folder);
    if cards.is_empty() {
        let first = directory::first(&folder);
        anyhow::bail!("card:{index}: no cards at {}\nhint: {}", first.display(), directory::HINT);
    }
    if index >= cards.len() {
        let (folder, last) = (folder.display(), cards.len() - 1);
        anyhow::bail!(
            "card:{index}: there is no card {index} in {folder}\nhint: there are 0 to {last}"
        );
    }
    let card = cards.swap_remove(index);
    let reason = directory::reason(&card);
    match card.card {
        Ok(card) => Ok(card.control),
        Err(_) => {
            let path = card.path.display();
            anyhow::bail!(
                "card {index} at {path} is down: {reason}\nhint: go on without it, or 'spanker cards' \
                 shows those that answer"
            )
        }
    }
}

/// A product on a card.
pub(super) fn product(product: &Arc<Product>, index: usize) -> anyhow::Result<Arc<dyn Backend>> {
    let backend = CardProduct::new(Arc::clone(product), open(index)?, DEADLINE);
    Ok(Arc::new(backend.map_err(|error| told(index, &error))?))
}

/// A model on a card.
pub(super) fn replica(questions: &Questions, index: usize) -> anyhow::Result<Arc<dyn Backend>> {
    let replica = Replica::on_card(Arc::clone(&questions.prompts), open(index)?, DEADLINE);
    Ok(Arc::new(replica.map_err(|error| told(index, &error))?))
}

/// An error with the card and what to do.
fn told(index: usize, error: &JobError) -> anyhow::Error {
    let busy = matches!(error, JobError::Model(LlmError::Device(error))
        if error.kind() == DeviceErrorKind::Busy);
    let hint = if busy { BUSY } else { "" };
    anyhow::anyhow!("card:{index}: {error}{hint}")
}

/// What a card, or whoever it is, says when it is first asked for something.
pub(super) fn failed(name: &str, failure: &Failure) -> anyhow::Error {
    let hint = if failure.is_lasting() || !name.starts_with("card") { "" } else { BUSY };
    anyhow::anyhow!("{name}: {failure}{hint}")
}
