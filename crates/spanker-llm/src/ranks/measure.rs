// SPDX-License-Identifier: Apache-2.0
//! What cards that are ranks take: a profile that predictions can be made with.
//!
//! The ranks themselves are measured, all at the same time, as they will run: they share memory bandwidth, caches and
//! clock rates with each other, wait for each other, and messages come while others compute.

use std::collections::VecDeque;
use std::ops::{DerefMut, Range};
use std::sync::Arc;
use std::time::Instant;

use spanker_topology::{Kernels, Profile};

use super::{Laying, Leader, OnRanks, Stepping};
use crate::measure::{Cards, Measurable, Ready, Samples, Timed};
use crate::runner::Step;
use crate::{LlmError, Network, Subject};

impl Leader<'_> {
    /// Measures cards that are ranks, and makes a profile of one of them, or of each if they are `apart` on machines
    /// that may differ. `subject.threads` are those of this rank alone; `subject.memory` is that of all. `progress` is
    /// called with the number of rows that is measured next.
    ///
    /// # Errors
    /// What [`Leader::lay_out`] and steps fail with.
    pub fn measure<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        subject: &Subject<'_>,
        apart: bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<Profile>, LlmError> {
        let mut samples = RankSamples::new(network, subject, apart)?;
        self.measure_more(network, subject, &mut samples, progress)?;
        Ok(samples.profiles())
    }

    /// Measures once more, and adds that to what was seen before.
    ///
    /// # Errors
    /// What [`Leader::lay_out`] and steps fail with.
    pub fn measure_more<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        subject: &Subject<'_>,
        samples: &mut RankSamples,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), LlmError> {
        let RankSamples { ready, samples, .. } = samples;
        let mut runner = self.measurable(network, subject, ready)?;
        ready.round(&mut runner, samples, progress)
    }

    /// Profiles that were measured before, of one rank or of each if they are `apart`, with what tokens, short prompts, whole batches and exchanges take now: that
    /// depends on where processes and virtual machines run at the moment. A few steps say so.
    ///
    /// # Errors
    /// What [`Leader::lay_out`] and steps fail with.
    pub fn refresh<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        subject: &Subject<'_>,
        apart: bool,
        profiles: Vec<Profile>,
    ) -> Result<Vec<Profile>, LlmError> {
        if subject.layout.cards().len() < 2 {
            return Ok(profiles);
        }
        let cards = played(apart);
        let ready = Ready::new(network.model(), subject, cards)?;
        let mut runner = self.measurable(network, subject, &ready)?;
        ready.refreshed(&mut runner, cards, profiles)
    }

    /// A layout whose steps can be measured.
    fn measurable<B: AsRef<[u8]> + Send + Sync>(
        &mut self,
        network: &Arc<Network<B>>,
        subject: &Subject<'_>,
        ready: &Ready,
    ) -> Result<impl Measurable, LlmError> {
        let space = (ready.context, ready.batch);
        let ranks: Vec<usize> = (0..self.ranks()).collect();
        let plan = (&ready.plan, &ranks[..]);
        let (rank_part, memory) =
            self.lay(network, plan, space, subject.threads, Laying::Filled)?;
        let begun = VecDeque::new();
        let mut runner = OnRanks { leader: self, rank_part, memory, audited: None, begun };
        runner.record()?;
        Ok(runner)
    }
}

/// What was seen of cards that are ranks, in one round or several.
#[derive(Debug)]
pub struct RankSamples {
    ready: Ready,
    samples: Samples,
    kernels: Kernels,
    /// How many profiles there are.
    members: usize,
}

impl RankSamples {
    /// Nothing so far, of ranks that are alike or `apart` on machines that may differ.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a layout that is none of this model.
    pub fn new<B: AsRef<[u8]>>(
        network: &Network<B>,
        subject: &Subject<'_>,
        apart: bool,
    ) -> Result<RankSamples, LlmError> {
        let cards = played(apart);
        let ready = Ready::new(network.model(), subject, cards)?;
        let kernels = crate::inproc::kernels(subject.threads, 1);
        let members = if apart { subject.layout.cards().len() } else { 1 };
        Ok(RankSamples { ready, samples: Samples::new(cards), kernels, members })
    }

    /// The profiles that follow from it: of one card, or of each of the layout's if they are apart.
    #[must_use]
    pub fn profiles(&self) -> Vec<Profile> {
        let of = |member: usize| Profile {
            kernels: self.kernels,
            ..self.ready.profile_of(&self.samples, member)
        };
        (0..self.members).map(of).collect()
    }
}

fn played(apart: bool) -> Cards {
    if apart { Cards::Workers } else { Cards::Ranks }
}

impl<'f, F: DerefMut<Target = Leader<'f>>, B: AsRef<[u8]> + Send + Sync> Measurable
    for OnRanks<F, B>
{
    fn groups(&self) -> &[Range<usize>] {
        self.rank_part.programs.groups()
    }

    fn timed(&mut self, step: &Step<'_>, layers: Option<&[u32]>) -> Result<Timed, LlmError> {
        let layers = layers.unwrap_or(&[]);
        let begun = Instant::now();
        self.go(step, (layers, 0), begun)?;
        self.conclude()?;
        let wall = begun.elapsed().as_secs_f64();
        let since = self.leader.wire.clock(begun) - self.leader.recording_since();
        let mut marks = vec![Vec::new(); self.rank_part.ranks.len()];
        for mut mark in self.leader.marks()? {
            let members = self.rank_part.programs.members();
            let member = members.iter().position(|member| member.card == mark.card as usize);
            let Some(member) = member else { continue };
            (mark.start, mark.end) = (mark.start - since, mark.end - since);
            marks[member].push(mark);
        }
        let of = Stepping { step, layers, salt: 0, traced: true };
        let programs = Arc::new(self.rank_part.programs_of(of).0);
        Ok(Timed { programs, marks, wall })
    }
}
