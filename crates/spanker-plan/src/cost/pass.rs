// SPDX-License-Identifier: Apache-2.0
//! What goes through the model at once, as the planner counts it.

/// What is priced together: passes, and how often each is made.
pub(crate) type Passes = std::rc::Rc<[(Pass, f64)]>;

/// Tokens of each of some sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pass {
    /// Sequences. Where sequences do not divide evenly into micro-batches, those of the largest one.
    pub(crate) sequences: u64,
    /// Tokens of each sequence.
    pub(crate) tokens: u64,
    /// Tokens of each sequence that are there already.
    pub(crate) past: u64,
}

impl Pass {
    /// One token of each sequence.
    pub(crate) fn decode(sequences: u64, position: u64) -> Pass {
        Pass { sequences, tokens: 1, past: position }
    }

    /// The pieces in which a prompt goes through, one after the other.
    pub(crate) fn pieces(sequences: u64, prompt: u64, batch: u64) -> Vec<Pass> {
        let most = Self::most(sequences, batch);
        let piece = |past: u64| {
            let tokens = most.min(prompt - past);
            Pass { sequences, tokens, past }
        };
        (0..prompt).step_by(most as usize).map(piece).collect()
    }

    /// The same for prices, which are lines over the tokens that are there already: the mean of all full
    /// pieces and how many there are, and the last one if it is shorter.
    pub(crate) fn prefill(sequences: u64, prompt: u64, batch: u64) -> Vec<(Pass, f64)> {
        let most = Self::most(sequences, batch);
        let (full, rest) = (prompt / most, prompt % most);
        let piece = |tokens: u64, past: u64| Pass { sequences, tokens, past };
        let mut passes = Vec::new();
        if full > 0 {
            passes.push((piece(most, (full - 1) * most / 2), full as f64));
        }
        if rest > 0 {
            passes.push((piece(rest, full * most), 1.0));
        }
        passes
    }

    /// Tokens of each sequence in a full piece.
    fn most(sequences: u64, batch: u64) -> u64 {
        (batch / sequences.max(1)).max(1)
    }

    /// Rows of the products.
    pub(crate) fn rows(self) -> f64 {
        (self.sequences * self.tokens) as f64
    }
}
