// SPDX-License-Identifier: Apache-2.0
//! GPUs as cards of a model.

#[cfg(feature = "cuda")]
pub(crate) use with::Gpus;
#[cfg(not(feature = "cuda"))]
pub(crate) use without::Gpus;

#[cfg(feature = "cuda")]
mod with {
    use std::sync::Arc;

    use spanker_cuda::{Gpu, Processors, Speeds, Subject, discover, discover_logical, gpu_count};
    use spanker_fabric::device::DeviceErrorKind;
    use spanker_llm::{LlmError, Loading, OnMachine, Twice};
    use spanker_plan::{Layout, Plan, Request, Split as Matrices};
    use spanker_topology::{Cluster, Profile};

    use crate::cards::loading;
    use crate::error::{EngineError, Result};
    use crate::host::{Backend, Event, Fabric, Load, Loaded, Watch};
    use crate::layout::{self, Split};
    use crate::model::Model;
    use crate::profiles::{self, Freshness};
    use crate::threads::{on_threads, uniform};

    /// The GPUs that the driver shows.
    pub(crate) struct Gpus {
        gpus: Vec<Arc<Gpu>>,
        cards: usize,
    }

    fn unavailable(error: impl std::fmt::Display) -> EngineError {
        EngineError::unavailable(error.to_string(), None)
    }

    impl Gpus {
        /// As many as there are cards, or all.
        pub(crate) fn open(cards: usize) -> Result<Gpus> {
            let count = gpu_count().map_err(unavailable)?.min(cards.max(1));
            let kernels = profiles::cache_folder().map(|folder| folder.join("kernels"));
            let gpus = (0..count).map(|index| {
                let gpu = Gpu::open(index)?;
                Ok(Arc::new(gpu.keep_kernels(kernels.clone())))
            });
            let gpus = gpus.collect::<Result<_, spanker_cuda::CudaError>>().map_err(unavailable)?;
            Ok(Gpus { gpus, cards })
        }

        /// How many bytes the first GPU reads in a second, from a stream of them.
        pub(crate) fn read_rate(&self) -> Result<f64> {
            let probed = spanker_cuda::probe(&self.gpus[0]).map_err(unavailable)?;
            Ok(probed.read.bytes_per_second as f64)
        }
    }

    impl Backend for Gpus {
        fn fabric(&self) -> Fabric {
            Fabric::Cuda
        }

        fn indices(&self) -> Vec<usize> {
            (0..self.cards).collect()
        }

        fn threads(&self) -> usize {
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        }

        /// Measured for a moment; nothing is kept, because it takes less than to read what was kept.
        fn cluster(
            &self,
            model: &Model,
            request: &Request,
            layout: &Layout,
            freshness: Freshness,
            observer: &Watch,
        ) -> Result<Cluster> {
            if freshness == Freshness::Assumed {
                return uniform(profiles::assumed(layout)?, layout);
            }
            let cards = layout.cards().last().map_or(1, |card| card + 1);
            let found = match cards > self.gpus.len() {
                false => discover(),
                true => discover_logical(0, cards),
            };
            let found = found.map_err(unavailable)?;
            let published = found.cluster().map_err(unavailable)?;
            let profiles: Vec<Profile> =
                (0..cards).map(|card| published.profile(card).clone()).collect();
            let cluster = Cluster::new(profiles, found.shape());
            let cluster = cluster.map_err(|error| EngineError::cluster(&error))?;
            let reduces = layout.stages().any(|stage| stage.group.split == Matrices::Reduce);
            let groups: Vec<Vec<(usize, f64)>> = layout
                .stages()
                .map(|stage| stage.group.cards.iter().map(|&card| (card, 1.0)).collect())
                .collect();
            let subject = Subject {
                model: model.shape(),
                split: if reduces { Matrices::Reduce } else { Matrices::Gather },
                groups: &groups,
                context: request.context as usize,
                batch: request.batch as usize,
                kv: request.kv,
            };
            observer(&Event::MeasuringGpus);
            let speeds = Speeds::measure(&self.gpus, &cluster, &subject);
            observer(&Event::Done);
            speeds.map_err(unavailable)?.cluster(&cluster).map_err(unavailable)
        }

        fn measures_layouts(&self) -> bool {
            true
        }

        fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
            let Load { model, plan, recorder, log, observer } = load;
            let Request { context, batch, audit, .. } = plan.request;
            let (context, batch) = (context as usize, batch as usize);
            // Programs go by stages. The plan's cards are the first of those that are left, and errors have these numbers.
            let number = |&card: &usize| left.get(card).copied().unwrap_or(card);
            let stages = plan.layout.stages();
            let cards: Vec<usize> =
                stages.flat_map(|stage| stage.group.cards.iter().map(number)).collect();
            let processors = Processors::new(&self.gpus, &cards)
                .map_err(|error| LlmError::Unsupported { what: error.to_string() })?;
            let progress = |at: Loading| observer(&loading(at));
            let runner =
                OnMachine::load(model.network(), plan, context, batch, processors, &progress);
            observer(&Event::Done);
            let mut runner = runner?;
            let memory = runner.memory().to_vec();
            if let Some(recorder) = recorder {
                runner.record(recorder);
            }
            if audit > 0.0 {
                runner.audit(model.network(), &cards, log);
            }
            runner.warm_up()?;
            if audit < 1.0 {
                return Ok(Loaded { runner: Box::new(runner), memory });
            }
            let host = on_threads(model, plan, self.threads())?;
            let twice = Twice::new(Box::new(runner), Box::new(host));
            Ok(Loaded { runner: Box::new(twice), memory })
        }

        /// A processor that computes wrongly is left out, with all of its cards.
        fn survivors(&self, error: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
            let LlmError::Device(error) = error else { return None };
            let wrong = error.card().filter(|_| error.kind() == DeviceErrorKind::Wrong)?;
            let gpu = |card: usize| card % self.gpus.len();
            let others: Vec<usize> =
                left.iter().copied().filter(|card| gpu(*card) != gpu(wrong)).collect();
            (!others.is_empty()).then_some(others)
        }

        fn replan(&self, left: &[usize], model: &Model, request: Request) -> Result<Plan> {
            let shares = vec![1.0; left.len()];
            let usual = Split::Gather.layout(model.shape(), &shares);
            let usual = usual.or_else(|_| Split::Pipeline.layout(model.shape(), &shares))?;
            let measured =
                |layout: &Layout| self.cluster(model, &request, layout, Freshness::Kept, &|_| {});
            let cluster = measured(&usual)?;
            let layout = layout::best(model.shape(), &cluster, &request, false, false)?;
            let cluster = if layout == usual { cluster } else { measured(&layout)? };
            layout::fitting(Plan::new(model.shape().clone(), cluster, request, layout)?, left)
        }

        fn gpus(&self) -> Option<&Gpus> {
            Some(self)
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod without {
    use spanker_llm::LlmError;
    use spanker_plan::{Layout, Request};
    use spanker_topology::Cluster;

    use crate::error::{EngineError, Result};
    use crate::host::{Backend, Fabric, Load, Loaded, Watch};
    use crate::model::Model;
    use crate::profiles::Freshness;

    /// No GPUs: this build cannot have any.
    pub(crate) enum Gpus {}

    impl Gpus {
        pub(crate) fn open(_: usize) -> Result<Gpus> {
            let hint = "build it with 'cargo build --release --features cuda'";
            Err(EngineError::unavailable("built without CUDA", Some(hint.into())))
        }

        pub(crate) fn read_rate(&self) -> Result<f64> {
            match *self {}
        }
    }

    impl Backend for Gpus {
        fn fabric(&self) -> Fabric {
            match *self {}
        }

        fn indices(&self) -> Vec<usize> {
            match *self {}
        }

        fn threads(&self) -> usize {
            match *self {}
        }

        fn cluster(
            &self,
            _: &Model,
            _: &Request,
            _: &Layout,
            _: Freshness,
            _: &Watch,
        ) -> Result<Cluster> {
            match *self {}
        }

        fn measures_layouts(&self) -> bool {
            match *self {}
        }

        fn load<'h>(&'h self, _: &[usize], _: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
            match *self {}
        }
    }
}
