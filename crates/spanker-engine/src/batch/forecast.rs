// SPDX-License-Identifier: Apache-2.0
//! What so many clients will see: the same schedule in virtual time, with steps that take what they cost.

use std::collections::{HashMap, VecDeque};

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_plan::{Reach, StepPrices};

use super::blocks::BlockPool;
use super::schedule::{Budget, Schedule, SequenceId, StepParts};
use crate::draft::{MOST_GUESSES_TOGETHER, lengths};

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
    /// Rows of a step that something is asked for.
    pub(crate) outputs: usize,
    /// Steps that are under way at a time.
    pub(crate) depth: usize,
    /// Whether guesses are checked whatever they cost.
    pub(crate) is_eager: bool,
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

    /// Guesses of the sequences that wait for a token that the next step checks, by how likely each is, with as many rows and
    /// outputs as there is room for besides; `factor` says how many times as long as by the prices a step of so many rows
    /// takes.
    pub(crate) fn guesses(
        &self,
        chances: &[Vec<f64>],
        positions: usize,
        factor: impl Fn(usize) -> f64,
    ) -> Vec<usize> {
        let decoding = chances.len();
        let rows = self.batch.saturating_sub(decoding);
        let most = rows.min(self.outputs.saturating_sub(decoding)).min(MOST_GUESSES_TOGETHER);
        let price = |guesses: usize| {
            let (rows, each) = (decoding + guesses, 1 + guesses / decoding.max(1));
            // Guesses are shared out over the sequences for the price of looking back, which hardly depends on who has them.
            let reach = Reach::of((0..decoding).map(|_| (each as u64, positions as u64)));
            let pace = self.prices.pace(rows as u64, rows as u64, &reach).0;
            pace * factor(rows)
        };
        if self.is_eager {
            let mut left = most;
            let all = chances.iter().map(|own| {
                let count = own.len().min(left);
                left -= count;
                count
            });
            return all.collect();
        }
        lengths(chances, most, price)
    }

    /// What a step takes, and how long it keeps the next one waiting where others are under way.
    pub(crate) fn price(&self, step: &StepParts) -> [f64; 2] {
        let reach =
            Reach::of(step.parts.iter().map(|part| (part.tokens.len() as u64, part.past as u64)));
        let rows = step.rows() as u64;
        let outputs = step.outputs() as u64;
        [self.prices.time(rows, outputs, &reach).0, self.prices.pace(rows, outputs, &reach).0]
    }
}

/// What comes from the client's end of an answer to its next request, seconds. Steps that have begun by then go on
/// without it.
const TURNAROUND: f64 = 1e-3;

/// When requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Every client asks again when it has its answer.
    Closed,
    /// So many come in a second whether or not others have been answered, at times that follow from the seed.
    Open {
        /// Requests in a second, of all clients together.
        rate: f64,
        /// What times follow from.
        seed: u64,
    },
}

impl Arrivals {
    /// When each of some requests comes, in seconds from the first, if that does not depend on answers. Times between
    /// them are distributed exponentially.
    #[must_use]
    pub fn times(self, count: usize) -> Option<Vec<f64>> {
        let Arrivals::Open { rate, seed } = self else { return None };
        let (mut now, mut random) = (0.0, Pcg64Mcg::seed_from_u64(seed));
        let next = |_| {
            let here = now;
            let part: f64 = random.random();
            now -= (1.0 - part).ln() / rate;
            here
        };
        Some((0..count).map(next).collect())
    }
}

/// Clients of a service.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    /// When they come.
    pub arrivals: Arrivals,
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
    /// Steps of all copies of the model.
    pub steps: usize,
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

/// What clients of some copies of a model see, each copy with its blocks: request by request they go to one after the
/// other.
pub(crate) fn forecast(copies: &[(Pacing, usize)], load: ServiceLoad) -> Forecast {
    let times = load.arrivals.times(load.clients * load.requests);
    let mut seen = Seen::default();
    for (at, (pacing, blocks)) in copies.iter().enumerate() {
        let of_copy = |client: &usize| client % copies.len() == at;
        let clients: Vec<usize> = (0..load.clients).filter(of_copy).collect();
        Clients::new(pacing, *blocks, load).run(&clients, times.as_deref(), &mut seen);
    }
    let prompts = (load.clients * load.requests * load.prompt).max(1);
    Forecast {
        tokens_per_second: if seen.end > 0.0 { seen.tokens as f64 / seen.end } else { 0.0 },
        first: middle_and_tail(&mut seen.firsts),
        between: middle_and_tail(&mut seen.betweens),
        reused: seen.cached as f64 / prompts as f64,
        steps: seen.steps,
    }
}

/// What clients have seen.
#[derive(Default)]
struct Seen {
    firsts: Vec<f64>,
    betweens: Vec<f64>,
    tokens: usize,
    cached: usize,
    steps: usize,
    /// When the last answer was complete.
    end: f64,
}

/// A request on its way in virtual time.
struct Asked {
    client: usize,
    asked_at: f64,
    last: Option<f64>,
    left: usize,
}

/// Clients in virtual time on one copy of a model.
struct Clients<'p> {
    pacing: &'p Pacing,
    load: ServiceLoad,
    schedule: Schedule,
    asked: HashMap<SequenceId, Asked>,
    /// Requests that come later, in order: when, and whose.
    coming: VecDeque<(f64, usize)>,
    /// Requests of each client that are still to be asked when its answer is there.
    left: HashMap<usize, usize>,
    next_id: u64,
}

impl<'p> Clients<'p> {
    fn new(pacing: &'p Pacing, blocks: usize, load: ServiceLoad) -> Clients<'p> {
        Clients {
            pacing,
            load,
            schedule: Schedule::new(BlockPool::new(blocks, true), pacing.parallel),
            asked: HashMap::new(),
            coming: VecDeque::new(),
            left: HashMap::new(),
            next_id: 0,
        }
    }

    /// A request arrives.
    fn ask(&mut self, at: f64, client: usize) {
        self.next_id += 1;
        let (load, id) = (self.load, self.next_id);
        let own = (0..load.prompt as u32).map(|at| match (at as usize) < load.shared {
            true => at,
            false => at.wrapping_add((id as u32).wrapping_mul(7919)),
        });
        self.schedule.add(id, own.collect(), true);
        let one = Asked { client, asked_at: at, last: None, left: load.answer.max(1) };
        self.asked.insert(id, one);
    }

    /// Requests that have come by now.
    fn arrive(&mut self, now: f64) {
        while self.coming.front().is_some_and(|(at, _)| *at <= now) {
            if let Some((at, client)) = self.coming.pop_front() {
                self.ask(at, client);
            }
        }
    }

    fn run(mut self, clients: &[usize], times: Option<&[f64]>, seen: &mut Seen) {
        match times {
            Some(times) => {
                let mine = times.iter().enumerate().filter_map(|(at, &time)| {
                    let client = at % self.load.clients;
                    clients.contains(&client).then_some((time, client))
                });
                self.coming = mine.collect();
            }
            None => {
                let rest = self.load.requests.saturating_sub(1);
                self.left = clients.iter().map(|&client| (client, rest)).collect();
                let first = clients.iter().filter(|_| self.load.requests > 0);
                self.coming = first.map(|&client| (0.0, client)).collect();
            }
        }
        let (mut now, mut last_end) = (0.0f64, 0.0f64);
        let mut under_way: VecDeque<(StepParts, f64)> = VecDeque::new();
        loop {
            self.arrive(now);
            while under_way.len() < self.pacing.depth {
                seen.cached +=
                    self.schedule.admit().iter().map(|(_, reused)| reused).sum::<usize>();
                let (running, _) = self.schedule.counts();
                let budget = self.pacing.budget(running, self.load.prompt + self.load.answer / 2);
                let Some(step) = self.schedule.next(budget) else { break };
                self.schedule.begun(&step);
                let [time, pace] = self.pacing.price(&step);
                let end = (now + time).max(last_end + pace);
                last_end = end;
                seen.steps += 1;
                under_way.push_back((step, end));
            }
            let Some((step, end)) = under_way.pop_front() else {
                // Nobody asks anything until the next request comes.
                let Some((at, _)) = self.coming.front() else { break };
                now = now.max(*at);
                continue;
            };
            now = now.max(end);
            self.give_out(&step, now, seen);
        }
        seen.end = seen.end.max(now);
    }

    /// What a step gave goes to those who asked.
    fn give_out(&mut self, step: &StepParts, now: f64, seen: &mut Seen) {
        for id in self.schedule.done(step).into_iter().filter_map(|asked| asked.id) {
            let Some(one) = self.asked.get_mut(&id) else { continue };
            match one.last.replace(now) {
                None => seen.firsts.push(now - one.asked_at),
                Some(before) => seen.betweens.push(now - before),
            }
            seen.tokens += 1;
            one.left -= 1;
            if one.left > 0 {
                self.schedule.push(id, 1);
                continue;
            }
            let client = one.client;
            self.schedule.remove(id);
            if let Some(left @ 1..) = self.left.get_mut(&client) {
                *left -= 1;
                self.coming.push_back((now + TURNAROUND, client));
            }
        }
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
        let (outputs, is_eager) = (parallel, false);
        Pacing { prices: StepPrices::new(&plan), batch: 128, parallel, outputs, depth, is_eager }
    }

    fn load(clients: usize) -> ServiceLoad {
        let arrivals = Arrivals::Closed;
        ServiceLoad { clients, prompt: 40, shared: 0, answer: 48, requests: 2, arrivals }
    }

    fn seen(pacing: &Pacing, blocks: usize, load: ServiceLoad) -> Forecast {
        forecast(&[(pacing.clone(), blocks)], load)
    }

    #[test]
    fn more_clients_get_more_together_and_each_waits_longer() {
        let pacing = pacing(&[vec![(0, 1.0)]], 16, FAST);
        let seen: Vec<Forecast> =
            [1, 4, 16].map(|clients| seen(&pacing, 512, load(clients))).to_vec();
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
            let one = seen(&pacing(&[vec![(0, 1.0)]], 16, macs), 512, load(16));
            let both = pacing(&[vec![(0, 1.0)], vec![(1, 1.0)]], 16, macs);
            seen(&both, 512, load(16)).tokens_per_second / one.tokens_per_second
        };
        // Where arithmetic is what takes long; where it is reading, half as many rows read as much.
        let (slow, fast) = (gain(3e9), gain(FAST));
        assert!(slow > 1.6 && slow < 2.0 && fast > 1.1 && fast < slow, "{slow} {fast}");
    }

    #[test]
    fn shared_beginnings_of_prompts_are_computed_once() {
        let pacing = pacing(&[vec![(0, 1.0)]], 4, FAST);
        let long = ServiceLoad {
            clients: 1,
            prompt: 300,
            shared: 290,
            answer: 4,
            requests: 4,
            arrivals: Arrivals::Closed,
        };
        let shared = seen(&pacing, 64, long);
        assert!(shared.reused > 0.7, "{shared:?}");
        let alone = seen(&pacing, 64, ServiceLoad { shared: 0, ..long });
        assert!(alone.reused < 0.01 && alone.first[0] > 3.0 * shared.first[0], "{alone:?}");
    }

    #[test]
    fn two_copies_serve_twice_what_one_does() {
        let pacing = pacing(&[vec![(0, 1.0)]], 16, FAST);
        let one = seen(&pacing, 512, load(4));
        let both = forecast(&[(pacing.clone(), 512), (pacing, 512)], load(8));
        assert!((both.tokens_per_second / one.tokens_per_second - 2.0).abs() < 0.01, "{both:?}");
        assert_eq!(both.between, one.between);
    }

    #[test]
    fn requests_that_come_by_the_clock_wait_where_they_are_too_many() {
        let pacing = pacing(&[vec![(0, 1.0)]], 4, FAST);
        let most = seen(&pacing, 512, load(16)).tokens_per_second;
        let at = |part: f64| {
            let rate = part * most / 48.0;
            let arrivals = Arrivals::Open { rate, seed: 7 };
            seen(&pacing, 512, ServiceLoad { requests: 10, arrivals, ..load(8) })
        };
        let (half, twice) = (at(0.5), at(2.0));
        assert!((half.tokens_per_second / most - 0.5).abs() < 0.15, "{half:?} of {most}");
        assert!(twice.tokens_per_second > 0.8 * most && twice.tokens_per_second < 1.05 * most);
        assert!(twice.first[1] > 10.0 * half.first[1], "{half:?} {twice:?}");
    }

    #[test]
    fn times_between_requests_have_the_mean_and_the_spread_of_exponential_ones() {
        let times = Arrivals::Open { rate: 50.0, seed: 3 }.times(20_000).expect("times");
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let spread = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean * 50.0 - 1.0).abs() < 0.03, "{mean}");
        assert!((spread.sqrt() / mean - 1.0).abs() < 0.05, "{spread}");
        assert_eq!(Arrivals::Closed.times(3), None);
    }
}
