// SPDX-License-Identifier: Apache-2.0
//! What so many clients will see: the same schedule in virtual time, with steps that take what they cost.

use std::collections::{HashMap, VecDeque};

use spanker_plan::{Reach, StepPrices};

use super::blocks::BlockPool;
use super::schedule::{Budget, Schedule, SequenceId, StepParts};

/// How many times as long a step may take because of a prompt as it takes without.
const STRETCH: f64 = 2.0;
/// A part of a prompt goes into every step, however short steps are: at least so many rows.
const FEWEST_ROWS: usize = 4;

/// What decides how much a step has: prices, and what cards have room for.
#[derive(Debug, Clone)]
pub(crate) struct Pacing {
    pub(crate) prices: StepPrices,
    /// Rows of a step.
    pub(crate) batch: usize,
    /// Sequences that run at the same time.
    pub(crate) parallel: usize,
    /// Steps that are under way at a time.
    pub(crate) depth: usize,
}

impl Pacing {
    /// What the next step may have where `running` sequences run, which see so many positions each.
    pub(crate) fn budget(&self, running: usize, positions: usize) -> Budget {
        // In a pipeline everybody's sequences are shared out over the steps that are under way.
        let members = running.div_ceil(self.depth).clamp(1, self.parallel.max(1));
        let prompt_rows = self.prompt_rows(members, positions);
        Budget { rows: self.batch, prompt_rows, members: members + 1 }
    }

    /// The most rows of a prompt with which a step of so many sequences does not take too long.
    fn prompt_rows(&self, decoding: usize, positions: usize) -> usize {
        let reach = Reach::of((0..decoding).map(|_| (1, positions as u64)));
        let decoding = decoding as u64;
        let most = STRETCH * self.prices.pace(decoding, decoding, &reach).0;
        let fits =
            |rows: usize| self.prices.pace(decoding + rows as u64, decoding, &reach).0 <= most;
        let (mut fit, mut too_many) = (FEWEST_ROWS, self.batch + 1);
        while fit + 1 < too_many {
            let middle = fit.midpoint(too_many);
            *(if fits(middle) { &mut fit } else { &mut too_many }) = middle;
        }
        fit
    }

    /// What a step takes, and how long it keeps the next one waiting where others are under way.
    pub(crate) fn price(&self, step: &StepParts) -> [f64; 2] {
        let reach =
            Reach::of(step.parts.iter().map(|part| (part.tokens.len() as u64, part.past as u64)));
        let rows = step.rows() as u64;
        let outputs = step.parts.iter().filter(|part| part.asks).count() as u64;
        [self.prices.time(rows, outputs, &reach).0, self.prices.pace(rows, outputs, &reach).0]
    }
}

/// Clients that ask one thing after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceLoad {
    /// How many.
    pub clients: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Of these, those that all prompts begin with.
    pub shared: usize,
    /// Tokens of an answer.
    pub answer: usize,
    /// Requests of each client.
    pub requests: usize,
}

/// What clients see.
#[derive(Debug, Clone, PartialEq)]
pub struct Forecast {
    /// Tokens of answers in a second, of all clients together.
    pub tokens_per_second: f64,
    /// Seconds to the first token: the middle one, and what all but one of a hundred stay below.
    pub first: [f64; 2],
    /// The same between tokens.
    pub between: [f64; 2],
    /// The part of the prompts' tokens that was there already.
    pub reused: f64,
}

/// The middle one of some times, and what all but one of a hundred stay below.
#[must_use]
pub fn middle_and_tail(times: &mut [f64]) -> [f64; 2] {
    times.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| {
        let place = (part * times.len() as f64).ceil() as usize;
        times.get(place.saturating_sub(1)).or(times.last()).copied().unwrap_or(0.0)
    };
    [at(0.5), at(0.99)]
}

/// A request on its way in virtual time.
struct Asked {
    client: usize,
    asked_at: f64,
    last: Option<f64>,
    left: usize,
}

/// Clients in virtual time on one copy of a model.
pub(crate) fn forecast(pacing: &Pacing, blocks: usize, load: ServiceLoad) -> Forecast {
    let mut schedule = Schedule::new(BlockPool::new(blocks, true), pacing.parallel);
    let mut left = vec![load.requests; load.clients];
    let mut asked: HashMap<SequenceId, Asked> = HashMap::new();
    let (mut now, mut last_end, mut next_id) = (0.0f64, 0.0f64, 0u64);
    let (mut firsts, mut betweens) = (Vec::new(), Vec::new());
    let (mut tokens, mut cached) = (0usize, 0usize);
    let mut under_way: VecDeque<(StepParts, f64)> = VecDeque::new();
    let mut ask = |client: usize, now: f64, schedule: &mut Schedule, asked: &mut HashMap<_, _>| {
        let Some(rest) = left[client].checked_sub(1) else { return };
        left[client] = rest;
        next_id += 1;
        let own = (0..load.prompt as u32).map(|at| match (at as usize) < load.shared {
            true => at,
            false => at.wrapping_add(next_id as u32 * 7919),
        });
        schedule.add(next_id, own.collect(), true);
        let one = Asked { client, asked_at: now, last: None, left: load.answer.max(1) };
        asked.insert(next_id, one);
    };
    (0..load.clients).for_each(|client| ask(client, 0.0, &mut schedule, &mut asked));
    loop {
        while under_way.len() < pacing.depth {
            cached += schedule.admit().iter().map(|(_, reused)| reused).sum::<usize>();
            let (running, _) = schedule.counts();
            let budget = pacing.budget(running, load.prompt + load.answer / 2);
            let Some(step) = schedule.next(budget) else { break };
            schedule.begun(&step);
            let [time, pace] = pacing.price(&step);
            let end = (now + time).max(last_end + pace);
            last_end = end;
            under_way.push_back((step, end));
        }
        let Some((step, end)) = under_way.pop_front() else { break };
        now = now.max(end);
        for id in schedule.done(&step).into_iter().flatten() {
            let Some(one) = asked.get_mut(&id) else { continue };
            match one.last.replace(now) {
                None => firsts.push(now - one.asked_at),
                Some(before) => betweens.push(now - before),
            }
            tokens += 1;
            one.left -= 1;
            if one.left > 0 {
                schedule.push(id, 1);
                continue;
            }
            let client = one.client;
            schedule.remove(id);
            ask(client, now, &mut schedule, &mut asked);
        }
    }
    let prompts = (load.clients * load.requests * load.prompt).max(1);
    Forecast {
        tokens_per_second: if now > 0.0 { tokens as f64 / now } else { 0.0 },
        first: middle_and_tail(&mut firsts),
        between: middle_and_tail(&mut betweens),
        reused: cached as f64 / prompts as f64,
    }
}

#[cfg(test)]
mod tests {
    use spanker_model::{Quant, builtin};
    use spanker_plan::{Layout, Objective, Plan, Request, Split};
    use spanker_topology::{Cluster, MacsPerSecond, Profile, Shape};

    use super::*;

    /// Fast enough that reading weights is what takes long.
    const FAST: f64 = 100e9;

    fn pacing(groups: &[Vec<(usize, f64)>], parallel: usize, macs: f64) -> Pacing {
        let model = builtin("smollm2-135m", Quant::Q4_0).expect("a model");
        let cards = groups.iter().flatten().count();
        let mut profile = Profile::builtin("rev-a").expect("a profile");
        profile.compute.rate.value = MacsPerSecond(macs);
        let cluster = Cluster::uniform(profile, cards, Shape::Ring).expect("cards");
        let layout = Layout::of_groups(&model, Split::Gather, groups).expect("a layout");
        let sequences = parallel as u64;
        let request = Request { sequences, ..Request::new(Objective::Throughput) };
        let depth = groups.len().min(parallel);
        let plan = Plan::new(model, cluster, request, layout).expect("a plan");
        Pacing { prices: StepPrices::new(&plan), batch: 128, parallel, depth }
    }

    fn load(clients: usize) -> ServiceLoad {
        ServiceLoad { clients, prompt: 40, shared: 0, answer: 48, requests: 2 }
    }

    #[test]
    fn more_clients_get_more_together_and_each_waits_longer() {
        let pacing = pacing(&[vec![(0, 1.0)]], 16, FAST);
        let seen: Vec<Forecast> =
            [1, 4, 16].map(|clients| forecast(&pacing, 512, load(clients))).to_vec();
        for pair in seen.windows(2) {
            assert!(pair[1].tokens_per_second > 1.5 * pair[0].tokens_per_second, "{seen:?}");
            assert!(pair[1].between[0] > pair[0].between[0], "{seen:?}");
        }
        // Prompts of others stretch a step, and no more than they may.
        assert!(seen[2].between[1] < 1.3 * STRETCH * seen[2].between[0], "{seen:?}");
    }

    #[test]
    fn pipeline_of_two_cards_serves_nearly_twice_what_one_does() {
        let gain = |macs: f64| {
            let one = forecast(&pacing(&[vec![(0, 1.0)]], 16, macs), 512, load(16));
            let both = pacing(&[vec![(0, 1.0)], vec![(1, 1.0)]], 16, macs);
            forecast(&both, 512, load(16)).tokens_per_second / one.tokens_per_second
        };
        // Where arithmetic is what takes long; where it is reading, half as many rows read as much.
        let (slow, fast) = (gain(3e9), gain(FAST));
        assert!(slow > 1.6 && slow < 2.0 && fast > 1.1 && fast < slow, "{slow} {fast}");
    }

    #[test]
    fn shared_beginnings_of_prompts_are_computed_once() {
        let pacing = pacing(&[vec![(0, 1.0)]], 4, FAST);
        let long = ServiceLoad { clients: 1, prompt: 300, shared: 290, answer: 4, requests: 4 };
        let shared = forecast(&pacing, 64, long);
        assert!(shared.reused > 0.7, "{shared:?}");
        let alone = forecast(&pacing, 64, ServiceLoad { shared: 0, ..long });
        assert!(alone.reused < 0.01 && alone.first[0] > 3.0 * shared.first[0], "{alone:?}");
    }
}
