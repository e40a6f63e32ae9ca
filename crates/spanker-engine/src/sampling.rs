// SPDX-License-Identifier: Apache-2.0
//! How tokens are chosen.

use spanker_text::{Sampler, Settings};

use crate::error::Result;

/// How tokens are chosen, from where in the generator's sequence.
#[derive(Debug, Clone)]
pub struct Sampling {
    pub(crate) sampler: Sampler,
}

impl Sampling {
    /// Always the best token.
    ///
    /// # Panics
    /// Never: these settings make sense.
    #[must_use]
    pub fn greedy() -> Sampling {
        Sampling { sampler: Sampler::new(Settings::greedy()).expect("settings that make sense") }
    }

    /// By these settings. The same seed gives the same tokens.
    ///
    /// # Errors
    /// [`crate::EngineError::Text`] for a setting that makes no sense.
    pub fn new(settings: Settings) -> Result<Sampling> {
        Ok(Sampling { sampler: Sampler::new(settings)? })
    }
}
