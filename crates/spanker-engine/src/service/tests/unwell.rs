// SPDX-License-Identifier: Apache-2.0
//! Backends that go wrong in ways that emulated cards do not: without a culprit, or just when something else has happened.

use std::cell::Cell;

use spanker_llm::{LlmError, Outcome, Runner, Step};
use spanker_plan::{Layout, Plan};

use super::*;
use crate::host::{Fabric, Load, Loaded, Watch};
use crate::profiles::Freshness;
use crate::threads::Threads;

/// Cards whose steps are never right, and nobody can say which of them it is.
struct Unsure(Threads);

impl Backend for Unsure {
    fn fabric(&self) -> Fabric {
        self.0.fabric()
    }

    fn indices(&self) -> Vec<usize> {
        self.0.indices()
    }

    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster> {
        self.0.cluster(model, request, layout, freshness, observer)
    }

    fn measures_layouts(&self) -> bool {
        self.0.measures_layouts()
    }

    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let Loaded { runner, memory } = self.0.load(left, load)?;
        Ok(Loaded { runner: Box::new(Wrong(runner)), memory })
    }

    fn replan(&self, _: &[usize], model: &Model, request: Request) -> Result<Plan> {
        let layout = Split::Gather.layout(model.shape(), &[1.0])?;
        let cluster = self.cluster(model, &request, &layout, Freshness::Kept, &|_| {})?;
        Ok(Plan::new(model.shape().clone(), cluster, request, layout)?)
    }

    fn survivors(&self, _: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        Some(left.to_vec())
    }
}

struct Wrong<'r>(Box<dyn Runner + 'r>);

impl Runner for Wrong<'_> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.0.begin(step)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.0.end()?;
        Err(LlmError::Unsure { past: 0 })
    }

    fn batch(&self) -> usize {
        self.0.batch()
    }
}

#[test]
fn cards_that_are_wrong_again_and_again_without_a_culprit_end_the_service() {
    let (_folder, model) = shared_model();
    let open = || Ok(Host::test(Unsure(Threads::new(1, 1))));
    let service = Service::start(model, options(), open).expect("a service");
    let (updates, _) = submit(&service, ask(0));
    let failed = loop {
        match updates.recv_timeout(Duration::from_secs(120)).expect("an end") {
            Update::Begun { .. } => {}
            Update::Failed { what, is_request } => break (what, is_request),
            other => panic!("{other:?}"),
        }
    };
    assert!(!failed.1, "{failed:?}");
    assert!(service.status().broken.is_some());
    assert!(matches!(service.submit(ask(0), |_| true), Err(Refusal::Broken(_))));
}

/// Three cards of which the last is lost at once, comes back, and is lost again while the model is brought onto it; another
/// is gone by then.
struct Fickle {
    threads: Threads,
    loads: Cell<usize>,
    is_back: Cell<bool>,
}

impl Fickle {
    fn lost(&self) -> bool {
        self.loads.get() > 2
    }
}

impl Backend for Fickle {
    fn fabric(&self) -> Fabric {
        self.threads.fabric()
    }

    fn indices(&self) -> Vec<usize> {
        vec![0, 1, 2]
    }

    fn threads(&self) -> usize {
        self.threads.threads()
    }

    fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster> {
        self.threads.cluster(model, request, layout, freshness, observer)
    }

    fn measures_layouts(&self) -> bool {
        self.threads.measures_layouts()
    }

    /// All three, then two, then three that are no longer there, then one.
    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        self.loads.set(self.loads.get() + 1);
        match (self.loads.get(), left) {
            (1, [0, 1, 2]) => {
                let Loaded { runner, memory } = self.threads.load(&[0], load)?;
                Ok(Loaded { runner: Box::new(Wrong(runner)), memory })
            }
            (2, [0, 1]) | (4, [0]) => self.threads.load(&[0], load),
            (3, [0, 1, 2]) => Err(LlmError::Unsure { past: 0 }),
            other => panic!("{other:?}"),
        }
    }

    fn replan(&self, left: &[usize], model: &Model, request: Request) -> Result<Plan> {
        if self.lost() && left.len() == 2 {
            return Err(EngineError::request("a card has gone"));
        }
        let layout = Split::Gather.layout(model.shape(), &[1.0])?;
        let cluster = self.cluster(model, &request, &layout, Freshness::Kept, &|_| {})?;
        Ok(Plan::new(model.shape().clone(), cluster, request, layout)?)
    }

    fn survivors(&self, _: &LlmError, left: &[usize]) -> Option<Vec<usize>> {
        Some(left[..left.len() - 1].to_vec())
    }

    fn returned(&self, _: &[usize]) -> Option<Vec<usize>> {
        (!self.is_back.replace(true)).then(|| vec![0, 1, 2])
    }

    fn lack_one(&self, left: &[usize]) -> bool {
        self.lost() && left.contains(&1)
    }

    fn missed(&self, left: &[usize]) -> Option<LlmError> {
        self.lack_one(left).then_some(LlmError::Unsure { past: 0 })
    }
}

#[test]
fn card_that_is_gone_again_while_another_is_missed_ends_nothing() {
    let (_folder, model) = shared_model();
    let open = || {
        let (loads, is_back) = (Cell::new(0), Cell::new(false));
        Ok(Host::test(Fickle { threads: Threads::new(1, 1), loads, is_back }))
    };
    let service = Service::start(Arc::clone(&model), options(), open).expect("a service");
    for turn in 0..200 {
        let (tokens, ..) = read(&submit(&service, ask(turn % 4)).0);
        assert_eq!(tokens, alone(&model, Quant::F16, turn % 4), "{turn}");
        if service.status().cards_lost == 2 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = service.status();
    assert_eq!((status.cards_lost, status.broken), (2, None));
}
