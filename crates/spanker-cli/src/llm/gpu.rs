// SPDX-License-Identifier: Apache-2.0
//! Graphics processors as cards of a model.

#[cfg(feature = "cuda")]
pub(crate) use with::Gpus;
#[cfg(not(feature = "cuda"))]
pub(crate) use without::Gpus;

#[cfg(feature = "cuda")]
mod with {
    use std::sync::Arc;

    use spanker_cuda::{Gpu, Processors, Speeds, Subject, discover, discover_logical, gpu_count};
    use spanker_llm::{MemoryUse, OnMachine, Recorder, Runner};
    use spanker_plan::{Plan, Split as Matrices};
    use spanker_topology::{Cluster, Profile};

    use crate::llm::{Loaded, Split, layout, loading};
    use crate::{Usage, output};

    /// The processors that the driver shows.
    pub(crate) struct Gpus(Vec<Arc<Gpu>>);

    impl Gpus {
        /// As many as there are cards, or all.
        pub(crate) fn open(cards: usize) -> anyhow::Result<Gpus> {
            let gpus =
                (0..gpu_count()?.min(cards.max(1))).map(|index| Gpu::open(index).map(Arc::new));
            Ok(Gpus(gpus.collect::<Result<_, _>>()?))
        }

        /// Cards that are processors, or logical ones that share the first; with what these do with the model as
        /// one group, measured for a moment.
        pub(crate) fn cluster(&self, loaded: &Loaded, cards: usize) -> anyhow::Result<Cluster> {
            self.cluster_for(loaded, Split::Gather, cards)
        }

        /// The same for cards that have the model in this split.
        pub(crate) fn cluster_for(
            &self,
            loaded: &Loaded,
            split: Split,
            cards: usize,
        ) -> anyhow::Result<Cluster> {
            let found = match cards > self.0.len() {
                false => discover()?,
                true => discover_logical(0, cards)?,
            };
            let published = found.cluster()?;
            let profiles: Vec<Profile> =
                (0..cards).map(|card| published.profile(card).clone()).collect();
            let cluster = Cluster::new(profiles, found.shape())?;
            let subject = Subject {
                model: loaded.network.model(),
                split: if split == Split::Reduce { Matrices::Reduce } else { Matrices::Gather },
                groups: &layout::groups(split, &vec![1.0; cards]),
                context: loaded.context,
                batch: loaded.batch,
            };
            output::progress("measuring the GPU ..");
            let speeds = Speeds::measure(&self.0, &cluster, &subject);
            output::progress_done();
            Ok(speeds?.cluster(&cluster)?)
        }

        pub(crate) fn runner(
            &self,
            loaded: &Loaded,
            plan: &Plan,
        ) -> anyhow::Result<(Box<dyn Runner>, Vec<MemoryUse>)> {
            self.recorded_runner(loaded, plan, None)
        }

        /// A runner that writes down what the cards do, where somebody wants to know.
        pub(crate) fn recorded_runner(
            &self,
            loaded: &Loaded,
            plan: &Plan,
            recorder: Option<&Recorder>,
        ) -> anyhow::Result<(Box<dyn Runner>, Vec<MemoryUse>)> {
            let cards = plan.layout.cards();
            if cards.len() > 256 {
                return Err(Usage(format!("{} cards on GPUs: at most 256", cards.len())).into());
            }
            let processors = Processors::new(&self.0, &cards, loaded.context)?;
            let (context, batch) = (loaded.context, loaded.batch);
            let runner =
                OnMachine::load(&loaded.network, plan, context, batch, processors, &loading);
            output::progress_done();
            let mut runner = runner?;
            let memory = runner.memory().to_vec();
            if let Some(recorder) = recorder {
                runner.record(recorder);
            }
            Ok((Box::new(runner), memory))
        }

        /// How many bytes the first processor reads in a second, from a stream of them.
        pub(crate) fn read_rate(&self) -> anyhow::Result<f64> {
            Ok(spanker_cuda::probe(&self.0[0])?.read.bytes_per_second as f64)
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod without {
    use spanker_llm::{MemoryUse, Recorder, Runner};
    use spanker_plan::Plan;
    use spanker_topology::Cluster;

    use crate::llm::{Loaded, Split};

    /// No processors: this build cannot have any.
    pub(crate) enum Gpus {}

    impl Gpus {
        pub(crate) fn open(_: usize) -> anyhow::Result<Gpus> {
            anyhow::bail!(
                "this spanker was built without CUDA\nhint: build it with 'cargo build --release --features cuda'"
            );
        }

        pub(crate) fn cluster(&self, _: &Loaded, _: usize) -> anyhow::Result<Cluster> {
            match *self {}
        }

        pub(crate) fn cluster_for(
            &self,
            _: &Loaded,
            _: Split,
            _: usize,
        ) -> anyhow::Result<Cluster> {
            match *self {}
        }

        pub(crate) fn recorded_runner(
            &self,
            _: &Loaded,
            _: &Plan,
            _: Option<&Recorder>,
        ) -> anyhow::Result<(Box<dyn Runner>, Vec<MemoryUse>)> {
            match *self {}
        }

        pub(crate) fn runner(
            &self,
            loaded: &Loaded,
            plan: &Plan,
        ) -> anyhow::Result<(Box<dyn Runner>, Vec<MemoryUse>)> {
            self.recorded_runner(loaded, plan, None)
        }

        pub(crate) fn read_rate(&self) -> anyhow::Result<f64> {
            match *self {}
        }
    }
}
