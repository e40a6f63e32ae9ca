// SPDX-License-Identifier: Apache-2.0
//! Comparisons of predictions with measurements: planted causes are found, causes add up, and traces that do
//! not belong together are refused.

use proptest::prelude::*;
use spanker_plan::{
    Activity, Causes, CompareError, Comparison, Gap, Label, Mark, Parts, Trace, compare,
    compare_pieces,
};

/// What a machine does, and what is wrong with it.
#[derive(Debug, Clone)]
struct Machine {
    cards: u32,
    layers: u32,
    tokens: u32,
    /// Whether a card has a part of every layer, or layers of its own.
    pipeline: bool,
    /// How many times as long a card's memory takes.
    memory: Vec<f64>,
    latency: f64,
    bandwidth: f64,
    /// Time between operators that is in no program.
    idle: f64,
    /// Time of the host before every step.
    host: f64,
    /// Whether products that share inputs have one mark.
    together: bool,
}

impl Machine {
    fn new(cards: u32) -> Machine {
        // Unequal cards: waiting is part of the prediction.
        let memory = (0..cards).map(|card| 1.0 + 0.05 * f64::from(card)).collect();
        let (latency, bandwidth) = (20e-6, 0.0);
        Machine {
            cards,
            layers: 4,
            tokens: 3,
            pipeline: false,
            memory,
            latency,
            bandwidth,
            idle: 0.0,
            host: 30e-6,
            together: false,
        }
    }

    fn predicted(&self) -> Trace {
        self.play(true)
    }

    fn measured(&self) -> Trace {
        self.play(false)
    }

    fn play(&self, predicted: bool) -> Trace {
        let cards = self.cards as usize;
        let mut run = Run {
            machine: self,
            predicted,
            clocks: vec![0.0; cards],
            ops: vec![0; cards],
            marks: vec![],
        };
        let mut tokens = Vec::new();
        for token in 0..self.tokens {
            let begin = run.clocks.iter().copied().fold(0.0, f64::max) + self.host;
            run.clocks.fill(begin);
            run.ops.fill(0);
            if self.pipeline {
                run.stages(token)
            } else {
                run.together(token)
            }
            tokens.push(run.clocks.iter().copied().fold(0.0, f64::max));
        }
        Trace { cards, tokens, marks: run.marks, incidents: vec![], events: 0 }
    }
}

struct Run<'a> {
    machine: &'a Machine,
    predicted: bool,
    clocks: Vec<f64>,
    ops: Vec<u32>,
    marks: Vec<Mark>,
}

impl Run<'_> {
    fn together(&mut self, token: u32) {
        let cards = 0..self.machine.cards;
        for layer in 0..self.machine.layers {
            let label = |activity| Label { activity, layer, token };
            for card in cards.clone() {
                self.products(card, label(Activity::Attention));
            }
            self.exchange(label(Activity::Exchange));
            for card in cards.clone() {
                self.work(card, label(Activity::Up), 150e-6, 10e-6);
            }
            self.exchange(label(Activity::Exchange));
        }
        // The others wait for the card that has the head.
        let label = Label { activity: Activity::Head, layer: self.machine.layers, token };
        self.work(0, label, 40e-6, 0.0);
    }

    fn stages(&mut self, token: u32) {
        let each = self.machine.layers / self.machine.cards;
        for layer in 0..self.machine.layers {
            let (card, label) = (layer / each, |activity| Label { activity, layer, token });
            if layer % each == 0 && card > 0 {
                self.hand_off(card, label(Activity::Handoff));
            }
            self.products(card, label(Activity::Attention));
            self.work(card, label(Activity::Up), 150e-6, 10e-6);
        }
    }

    fn mark(&mut self, card: u32, label: Label, ops: u32, end: f64, parts: Parts) {
        let (at, start) = (card as usize, self.clocks[card as usize]);
        let parts = self.predicted.then_some(parts);
        self.marks.push(Mark { card, label, op: self.ops[at], ops, start, end, parts });
        self.ops[at] += ops;
        self.clocks[at] = end;
    }

    fn work(&mut self, card: u32, label: Label, memory: f64, compute: f64) {
        let memory = memory * self.machine.memory[card as usize];
        self.idle(card);
        let end = self.clocks[card as usize] + memory + compute;
        self.mark(card, label, 1, end, Parts { memory, compute, ..Parts::default() });
    }

    fn idle(&mut self, card: u32) {
        if self.ops[card as usize] > 0 {
            self.clocks[card as usize] += self.machine.idle;
        }
    }

    /// Two products of the same input.
    fn products(&mut self, card: u32, label: Label) {
        if !self.machine.together {
            self.work(card, label, 60e-6, 0.0);
            return self.work(card, label, 40e-6, 0.0);
        }
        self.idle(card);
        let seconds = (60e-6 + 40e-6) * self.machine.memory[card as usize];
        let end = self.clocks[card as usize] + seconds;
        self.mark(card, label, 2, end, Parts::default());
    }

    fn exchange(&mut self, label: Label) {
        let last = self.clocks.iter().copied().fold(0.0, f64::max);
        let Machine { latency, bandwidth, .. } = *self.machine;
        for card in 0..self.machine.cards {
            let waiting = last - self.clocks[card as usize];
            let parts = Parts { latency, bandwidth, waiting, ..Parts::default() };
            self.mark(card, label, 1, last + latency + bandwidth, parts);
        }
    }

    fn hand_off(&mut self, card: u32, label: Label) {
        let sent = self.clocks[card as usize - 1];
        let Machine { latency, bandwidth, .. } = *self.machine;
        let waiting = sent - self.clocks[card as usize];
        let parts = Parts { latency, bandwidth, waiting, ..Parts::default() };
        self.mark(card, label, 1, sent + latency + bandwidth, parts);
    }
}

fn adds_up(gap: &Gap) {
    let (sum, seconds) = (gap.causes.total(), gap.seconds());
    let scale = gap.predicted.abs().max(gap.measured.abs());
    assert!((sum - seconds).abs() <= 1e-9 * scale, "{sum} is not {seconds}: {gap:?}");
    let attributed = gap.causes.attributed();
    assert!((0.0..=1.0).contains(&attributed), "{attributed}: {gap:?}");
}

fn check(comparison: &Comparison) {
    adds_up(&comparison.whole);
    comparison.cards.iter().for_each(|card| adds_up(&card.gap));
    for piece in &comparison.pieces {
        adds_up(&piece.whole);
        piece.cards.iter().for_each(|card| adds_up(&card.gap));
    }
    let recovered: f64 = comparison.pieces.iter().map(|piece| piece.recovery).sum();
    let in_steps: f64 = comparison.steps.iter().map(|step| step.whole.measured).sum();
    let all = comparison.whole.measured;
    assert!((recovered + in_steps - all).abs() <= 1e-9 * all, "{recovered} {in_steps} {all}");
    for step in &comparison.steps {
        adds_up(&step.whole);
        step.cards.iter().for_each(|card| adds_up(&card.gap));
    }
}

fn compared(predicted: &Machine, measured: &Machine) -> Comparison {
    let comparison = compare(&predicted.predicted(), &measured.measured()).unwrap();
    check(&comparison);
    assert!(comparison.left_out.is_empty(), "{:?}", comparison.left_out);
    comparison
}

/// Whether a gap is there and one cause has 95 % of it, of all causes without their signs.
fn planted(gap: &Gap, cause: impl Fn(&Causes) -> f64) {
    let all = [gap.causes.memory, gap.causes.compute, gap.causes.latency, gap.causes.bandwidth];
    let Causes { host, recovery, not_in_program, unexplained, .. } = gap.causes;
    let rest = [host, recovery, not_in_program, unexplained];
    let all = all.iter().chain(&rest).chain(gap.causes.waiting.values());
    let all: f64 = all.map(|seconds| seconds.abs()).sum();
    assert!(gap.seconds() > 0.0, "{gap:?}");
    assert!(cause(&gap.causes) >= 0.95 * all, "{gap:?}");
}

fn card(comparison: &Comparison, card: u32) -> &Gap {
    &comparison.cards.iter().find(|one| one.card == card).unwrap().gap
}

#[test]
fn traces_that_agree_have_no_gap_and_no_causes() {
    for pipeline in [false, true] {
        for together in [false, true] {
            let machine = Machine { pipeline, ..Machine::new(2) };
            let comparison = compared(&machine, &Machine { together, ..machine.clone() });
            for gap in comparison.cards.iter().map(|one| &one.gap).chain([&comparison.whole]) {
                let Causes { memory, compute, latency, bandwidth, .. } = gap.causes;
                let Causes { host, not_in_program, unexplained, .. } = gap.causes;
                let all = [memory, compute, latency, bandwidth, host, not_in_program, unexplained];
                let all = all.iter().chain(gap.causes.waiting.values());
                assert!(all.map(|seconds| seconds.abs()).sum::<f64>() < 1e-12, "{gap:?}");
                assert!(gap.percent().unwrap().abs() < 1e-6);
            }
        }
    }
}

#[test]
fn slow_memory_of_one_card_is_its_memory_and_waiting_on_the_others() {
    for together in [false, true] {
        let machine = Machine { memory: vec![1.0; 4], ..Machine::new(4) };
        let mut slow = Machine { together, ..machine.clone() };
        slow.memory[2] *= 1.2;
        let comparison = compared(&machine, &slow);
        planted(&comparison.whole, |causes| causes.memory);
        planted(card(&comparison, 2), |causes| causes.memory);
        for other in [0, 1, 3] {
            planted(card(&comparison, other), |causes| causes.waiting[&2]);
        }
        let gap = card(&comparison, 0);
        assert!((gap.causes.attributed() - 1.0).abs() < 1e-9);
        // Four layers of 250 us, a fifth of it more, three times; the head is on a card that is not slow.
        assert!((comparison.whole.seconds() - 3.0 * 4.0 * 0.2 * 250e-6).abs() < 1e-9);
    }
}

#[test]
fn a_card_that_overtakes_the_one_that_was_to_be_last_ends_the_waiting_for_that_one() {
    // Card 1 is predicted to come last by 5 %; card 0 comes last by 15 % instead.
    let machine = Machine::new(2);
    let mut slow = machine.clone();
    slow.memory[0] *= 1.2;
    let comparison = compared(&machine, &slow);
    let causes = &comparison.whole.causes;
    assert!(causes.memory > 0.0 && causes.waiting[&1] < 0.0, "{causes:?}");
    let work = causes.memory + causes.compute;
    assert!((work + causes.waiting[&1] - comparison.whole.seconds()).abs() < 1e-9);
    assert!(causes.memory > 0.95 * work, "{causes:?}");
    let first = &card(&comparison, 0).causes;
    assert!(first.waiting[&1] < 0.0 && !first.waiting.contains_key(&0), "{first:?}");
    assert!(card(&comparison, 1).causes.waiting[&0] > 0.0);
}

#[test]
fn slow_memory_in_a_pipeline_is_followed_through_the_hand_off() {
    let machine = Machine { pipeline: true, ..Machine::new(2) };
    for slow_card in [0, 1] {
        let mut slow = machine.clone();
        slow.memory[slow_card as usize] *= 1.2;
        let comparison = compared(&machine, &slow);
        planted(&comparison.whole, |causes| causes.memory);
        planted(card(&comparison, slow_card), |causes| causes.memory);
        planted(card(&comparison, 1 - slow_card), |causes| causes.waiting[&slow_card]);
    }
}

#[test]
fn later_exchanges_are_link_latency_or_bandwidth_by_what_was_predicted() {
    for pipeline in [false, true] {
        let machine = Machine { pipeline, ..Machine::new(2) };
        let slow = Machine { latency: 35e-6, ..machine.clone() };
        let comparison = compared(&machine, &slow);
        planted(&comparison.whole, |causes| causes.latency);
        if !pipeline {
            comparison.cards.iter().for_each(|one| planted(&one.gap, |causes| causes.latency));
        }
        let machine = Machine { latency: 0.0, bandwidth: 50e-6, ..machine };
        let slow = Machine { bandwidth: 80e-6, ..machine.clone() };
        planted(&compared(&machine, &slow).whole, |causes| causes.bandwidth);
    }
}

#[test]
fn time_between_operators_is_not_in_the_program() {
    let machine = Machine { memory: vec![1.0; 3], ..Machine::new(3) };
    let comparison = compared(&machine, &Machine { idle: 8e-6, ..machine.clone() });
    planted(&comparison.whole, |causes| causes.not_in_program);
    planted(card(&comparison, 0), |causes| causes.not_in_program);
    let idle = f64::from(3 * machine.tokens * machine.layers) * 8e-6;
    assert!((comparison.whole.causes.not_in_program - idle).abs() < 1e-9);
}

#[test]
fn time_between_steps_is_the_hosts() {
    let machine = Machine::new(3);
    let comparison = compared(&machine, &Machine { host: 90e-6, ..machine.clone() });
    planted(&comparison.whole, |causes| causes.host);
    comparison.cards.iter().for_each(|one| planted(&one.gap, |causes| causes.host));
    // What is before the first step is before the comparison.
    assert!((comparison.whole.seconds() - 2.0 * 60e-6).abs() < 1e-9);
}

#[test]
fn marks_outside_the_program_go_to_the_host_or_to_not_in_program() {
    let machine = Machine::new(1);
    let (predicted, mut measured) = (machine.predicted(), machine.measured());
    let end = measured.end();
    let label = |activity| Label { activity, layer: 0, token: 2 };
    measured.marks.push(Mark::outside(0, label(Activity::Host), end, end + 3e-6));
    measured.marks.push(Mark::outside(0, label(Activity::Reload), end + 3e-6, end + 8e-6));
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    assert!((comparison.whole.causes.host - 3e-6).abs() < 1e-12);
    assert!((comparison.whole.causes.not_in_program - 5e-6).abs() < 1e-12);
}

#[test]
fn host_before_the_first_step_that_only_the_prediction_has_is_no_gap() {
    let machine = Machine::new(2);
    let (mut predicted, measured) = (machine.predicted(), machine.measured());
    // The host speaks to card 0, and card 1 waits for it in the first exchange.
    let label = Label { activity: Activity::Host, layer: 0, token: 0 };
    predicted.marks.insert(0, Mark::outside(0, label, 0.0, machine.host));
    let first = predicted.marks.iter_mut().find(|mark| mark.card == 1).unwrap();
    first.start = 0.0;
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    assert!(comparison.whole.seconds().abs() < 1e-9, "{:?}", comparison.whole);
}

#[test]
fn host_after_a_step_is_before_the_next_one_whichever_trace_shows_it() {
    let machine = Machine::new(2);
    let (mut predicted, measured) = (machine.predicted(), machine.measured());
    for token in 0..machine.tokens {
        let own = predicted.marks.iter().filter(|mark| mark.label.token == token);
        let end = own.map(|mark| mark.end).fold(0.0, f64::max);
        let label = Label { activity: Activity::Host, layer: machine.layers, token };
        predicted.marks.push(Mark::outside(0, label, end, end + machine.host));
    }
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    for gap in comparison.cards.iter().map(|one| &one.gap).chain([&comparison.whole]) {
        assert!(gap.seconds().abs() < 1e-9 && gap.causes.host.abs() < 1e-9, "{gap:?}");
    }
}

#[test]
fn operators_that_were_never_measured_are_unexplained() {
    let machine = Machine::new(2);
    let (predicted, mut measured) = (machine.predicted(), machine.measured());
    measured.marks.retain(|mark| mark.label.activity != Activity::Head);
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    let causes = &card(&comparison, 0).causes;
    assert!((causes.unexplained + 3.0 * 40e-6).abs() < 1e-9, "{causes:?}");
    assert!(causes.attributed() < 1.0, "{causes:?}");
}

#[test]
fn predictions_without_parts_leave_the_gap_unexplained() {
    let machine = Machine { memory: vec![1.0], ..Machine::new(1) };
    let slow = Machine { memory: vec![1.5], ..machine.clone() };
    // As if a measurement were taken for a prediction.
    let comparison = compare(&machine.measured(), &slow.measured()).unwrap();
    check(&comparison);
    assert!(comparison.whole.causes.unexplained / comparison.whole.seconds() > 0.999);
    assert!(comparison.whole.causes.attributed() < 0.001);
}

#[test]
fn tokens_that_one_trace_lacks_are_listed_and_left_out() {
    let machine = Machine { tokens: 5, ..Machine::new(2) };
    let (mut predicted, mut measured) = (machine.predicted(), machine.measured());
    predicted.marks.retain(|mark| mark.label.token != 4);
    measured.marks.retain(|mark| mark.label.token != 1);
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    let tokens: Vec<u32> = comparison.steps.iter().map(|step| step.token).collect();
    assert_eq!(tokens, [0, 2, 3]);
    // The time before token 2 is not known on both sides, and left out on both.
    assert!(comparison.whole.seconds().abs() < 1e-12);
    let left = &comparison.left_out;
    assert_eq!((left[0].token, left[1].token), (1, 4));
    assert!(left[0].why.contains("predicted") && left[1].why.contains("measured"), "{left:?}");
    let some = comparison.of_tokens(&(2..=4));
    assert_eq!((some.steps.len(), some.left_out.len()), (2, 1));
    let sum: f64 = some.steps.iter().map(|step| step.whole.predicted).sum();
    assert!((some.whole.predicted - sum).abs() < 1e-12);
}

#[test]
fn a_step_that_ran_twice_or_on_fewer_cards_is_left_out_with_the_reason() {
    let machine = Machine::new(2);
    let (predicted, mut measured) = (machine.predicted(), machine.measured());
    let end = measured.end();
    let label = Label { activity: Activity::Up, layer: 0, token: 2 };
    let (start, parts) = (end + 1e-3, None);
    measured.marks.push(Mark { card: 0, label, op: 0, ops: 1, start, end: start + 1e-4, parts });
    measured.marks.retain(|mark| mark.label.token != 1 || mark.card != 1);
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    assert_eq!(comparison.steps.len(), 1);
    let [fewer, twice] = &comparison.left_out[..] else { panic!("{:?}", comparison.left_out) };
    assert!(fewer.why.contains("cards 0..1, measured on cards 0"), "{}", fewer.why);
    assert!(twice.why.contains("measured trace card 0 ran op 0 after op"), "{}", twice.why);
}

#[test]
fn steps_that_a_card_mixes_are_left_out() {
    let machine = Machine { tokens: 4, ..Machine::new(1) };
    let (predicted, mut measured) = (machine.predicted(), machine.measured());
    // The last operators of token 1 come after all of token 2.
    let late = measured.marks.iter_mut().filter(|mark| mark.label.token == 1 && mark.op > 5);
    late.for_each(|mark| (mark.start, mark.end) = (mark.start + 1.0, mark.end + 1.0));
    let last = measured.marks.iter_mut().filter(|mark| mark.label.token == 3);
    last.for_each(|mark| (mark.start, mark.end) = (mark.start + 2.0, mark.end + 2.0));
    let comparison = compare(&predicted, &measured).unwrap();
    check(&comparison);
    let left: Vec<u32> = comparison.left_out.iter().map(|left| left.token).collect();
    assert_eq!(left, [1, 2]);
}

#[test]
fn traces_that_do_not_belong_together_are_refused_with_what_differs() {
    let machine = Machine::new(2);
    let (predicted, measured) = (machine.predicted(), machine.measured());
    let refused = |p: &Trace, m: &Trace| compare(p, m).unwrap_err();
    let said = |p: &Trace, m: &Trace| refused(p, m).to_string();

    let empty = Trace { marks: vec![], ..predicted.clone() };
    assert!(said(&empty, &measured).contains("the predicted trace has no marks"));
    assert!(said(&predicted, &empty).contains("the measured trace has no marks"));

    let three = said(&predicted, &Machine::new(3).measured());
    assert!(three.contains("cards 0..1") && three.contains("cards 0..2"), "{three}");

    let mut other = measured.clone();
    other.marks.iter_mut().for_each(|mark| mark.label.token += 10);
    let tokens = said(&predicted, &other);
    assert!(tokens.contains("tokens 0..2") && tokens.contains("tokens 10..12"), "{tokens}");

    let deeper = Machine { layers: 5, ..machine.clone() };
    let error = refused(&predicted, &deeper.measured());
    assert!(matches!(error, CompareError::Beyond { token: 0, card: 0, ops: 21, .. }), "{error:?}");
    assert!(error.to_string().contains("21 operators"), "{error}");

    for (start, end, what) in [
        (f64::NAN, 1.0, "not numbers"),
        (2.0, 1.0, "ends before it begins"),
        (0.0, 1e-4, "begins before the card's mark before it has ended"),
    ] {
        let mut wrong = measured.clone();
        let mark = wrong.marks.iter_mut().rfind(|mark| mark.card == 1).unwrap();
        (mark.start, mark.end) = (start, end);
        let error = said(&predicted, &wrong);
        assert!(error.contains(what) && error.contains("card 1"), "{error}");
    }
}

/// A trace so many seconds later.
fn later(mut trace: Trace, seconds: f64) -> Trace {
    for mark in &mut trace.marks {
        (mark.start, mark.end) = (mark.start + seconds, mark.end + seconds);
    }
    trace.tokens.iter_mut().for_each(|at| *at += seconds);
    trace
}

#[test]
fn pieces_after_a_loss_are_compared_each_with_its_own_prediction() {
    let (before, after) = (Machine::new(3), Machine::new(2));
    let slow = Machine { latency: 40e-6, ..after.clone() };
    let second = later(slow.measured(), before.measured().end() - slow.host);
    let pieces = [(before.predicted(), before.measured()), (after.predicted(), second)];
    let comparison = compare_pieces(&pieces).unwrap();
    check(&comparison);
    assert_eq!((comparison.cards.len(), comparison.pieces.len()), (3, 2));
    planted(&comparison.pieces[1].whole, |causes| causes.latency);
    assert!(comparison.pieces[0].whole.seconds().abs() < 1e-12);
    assert!(comparison.steps[..3].iter().all(|step| step.piece == 0));
    assert!(comparison.steps[3..].iter().all(|step| step.piece == 1));
    let wrong = [pieces[0].clone(), (before.predicted(), pieces[1].1.clone())];
    let error = compare_pieces(&wrong).unwrap_err().to_string();
    assert!(error.starts_with("piece 1: ") && error.contains("cards 0..2"), "{error}");
}

#[test]
fn recovery_between_pieces_is_a_cause_of_its_own_and_in_no_prediction() {
    let (before, after) = (Machine::new(3), Machine::new(2));
    let end = before.measured().end();
    let second = later(after.measured(), end + 5e-3 - after.host);
    let pieces = [(before.predicted(), before.measured()), (after.predicted(), second.clone())];
    let comparison = compare_pieces(&pieces).unwrap();
    check(&comparison);
    planted(&comparison.whole, |causes| causes.recovery);
    assert!((comparison.whole.causes.recovery - 5e-3).abs() < 1e-9, "{comparison:?}");
    let piece = &comparison.pieces[1];
    assert!((piece.recovery - 5e-3).abs() < 1e-9 && comparison.pieces[0].recovery == 0.0);
    // The cards that were left waited for it, the lost one did not.
    assert!(card(&comparison, 2).causes.recovery == 0.0);
    assert!((card(&comparison, 0).causes.recovery - 5e-3).abs() < 1e-9);
    let begin = before.measured().marks.iter().map(|mark| mark.start).fold(f64::INFINITY, f64::min);
    assert!((comparison.whole.measured - (second.end() - begin)).abs() < 1e-9);
    // A layout on which nothing was completed leaves its time to the next.
    let nothing = Trace { marks: vec![], ..before.measured() };
    let three = [pieces[0].clone(), (before.predicted(), nothing.clone()), pieces[1].clone()];
    let comparison = compare_pieces(&three).unwrap();
    check(&comparison);
    assert!(comparison.pieces[1].cards.is_empty() && comparison.pieces[1].recovery == 0.0);
    assert!((comparison.pieces[2].recovery - 5e-3).abs() < 1e-9);
    let error = compare_pieces(&[(before.predicted(), nothing)]).unwrap_err().to_string();
    assert_eq!(error, "the measured trace has no marks");
}

#[test]
fn pieces_on_clocks_of_their_own_are_refused() {
    let (before, after) = (Machine::new(3), Machine::new(2));
    let pieces = [(before.predicted(), before.measured()), (after.predicted(), after.measured())];
    let error = compare_pieces(&pieces).unwrap_err().to_string();
    assert!(error.starts_with("piece 1: it begins ") && error.contains("has ended"), "{error}");
}

#[test]
fn run_with_a_loss_that_is_taken_for_one_piece_is_no_comparison() {
    // What is compared with one layout's prediction in spite of a loss has other cards, or steps that ran twice.
    let (before, after) = (Machine::new(3), Machine::new(2));
    let mut all = before.measured();
    all.marks.extend(later(after.measured(), all.end()).marks);
    let error = compare(&after.predicted(), &all).unwrap_err().to_string();
    assert!(error.contains("predicted for cards 0..1, measured on cards 0..2"), "{error}");
    let error = compare(&before.predicted(), &all).unwrap_err().to_string();
    assert!(error.contains("no step can be compared"), "{error}");
}

/// A mark to be: how long after the one before, how long, how many operators, what, which parts.
type AnyMark = (f64, f64, u32, Activity, [f64; 6]);

/// A card's marks of a step.
fn any_marks() -> impl Strategy<Value = Vec<AnyMark>> {
    use Activity::{Attention, Exchange, Handoff, Head, Host, Stall, Up};
    let what = prop::sample::select(vec![Attention, Up, Exchange, Handoff, Head, Host, Stall]);
    let gap = prop_oneof![Just(0.0), 0.0f64..1e-4];
    let length = prop_oneof![Just(0.0), 0.0f64..1e-3];
    let parts = prop::array::uniform6(prop_oneof![Just(0.0), 0.0f64..1e-3]);
    prop::collection::vec((gap, length, 0u32..4, what, parts), 1..24)
}

fn any_trace(steps: &[Vec<Vec<AnyMark>>], predicted: bool) -> Trace {
    let cards = steps[0].len();
    let (mut clock, mut marks) = (0.0, Vec::new());
    for (token, step) in steps.iter().enumerate() {
        let begin = clock;
        for (card, planned) in step.iter().enumerate() {
            let (mut at, mut op) = (begin, 0);
            for (index, &(gap, length, ops, activity, parts)) in planned.iter().enumerate() {
                let label = Label { activity, layer: index as u32 / 3, token: token as u32 };
                let [memory, compute, fixed, latency, bandwidth, waiting] = parts;
                let parts = Parts { memory, compute, fixed, latency, bandwidth, waiting };
                let parts = predicted.then_some(parts);
                let (start, end) = (at + gap, at + gap + length);
                marks.push(Mark { card: card as u32, label, op, ops, start, end, parts });
                // A mark of no operators may leave one out.
                (at, op) = (end, op + ops.max(u32::from(length > 5e-4)));
            }
            clock = f64::max(clock, at);
        }
    }
    Trace { cards, tokens: vec![], marks, incidents: vec![], events: 0 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn causes_of_any_two_traces_add_up_to_their_gap(
        steps in (1usize..4, 1usize..4).prop_flat_map(|(cards, tokens)| {
            let step = || prop::collection::vec(any_marks(), cards);
            let steps = || prop::collection::vec(step(), tokens);
            (steps(), steps())
        }),
    ) {
        let (mut predicted, measured) = (any_trace(&steps.0, true), any_trace(&steps.1, false));
        // Programs that are long enough for what was measured.
        for card in 0..predicted.cards as u32 {
            for token in 0..steps.0.len() as u32 {
                let own = |mark: &&mut Mark| mark.card == card && mark.label.token == token;
                if let Some(last) = predicted.marks.iter_mut().filter(own).last() {
                    last.ops = 1000;
                }
            }
        }
        let comparison = compare(&predicted, &measured).unwrap();
        check(&comparison);
        prop_assert_eq!(comparison.steps.len() + comparison.left_out.len(), steps.0.len());
        prop_assert!(comparison.left_out.is_empty(), "{:?}", comparison.left_out);
    }

    #[test]
    fn causes_of_runs_in_pieces_add_up_to_their_gap(
        pieces in prop::collection::vec(
            (1u32..5, prop::collection::vec(0.5f64..2.0, 4), any::<bool>(), 0.0f64..1e-2),
            1..5,
        ),
    ) {
        let (mut traces, mut clock, mut recovered) = (Vec::new(), 0.0, 0.0);
        for (cards, memory, together, pause) in &pieces {
            let calm = Machine::new(*cards);
            let disturbed = Machine { memory: memory.clone(), together: *together, ..calm.clone() };
            let measured = later(disturbed.measured(), clock + pause - calm.host);
            if clock > 0.0 {
                recovered += pause;
            }
            clock = measured.end();
            traces.push((calm.predicted(), measured));
        }
        let comparison = compare_pieces(&traces).unwrap();
        check(&comparison);
        prop_assert_eq!(comparison.pieces.len(), pieces.len());
        prop_assert!((comparison.whole.causes.recovery - recovered).abs() < 1e-9);
        let sum: f64 = comparison.pieces.iter().map(|piece| piece.whole.seconds()).sum();
        prop_assert!((sum - comparison.whole.seconds()).abs() < 1e-9);
    }

    #[test]
    fn causes_of_disturbed_machines_add_up_and_are_all_attributed(
        pipeline in any::<bool>(),
        memory in prop::collection::vec(0.5f64..2.0, 4),
        latency in 0.0f64..1e-4,
        bandwidth in 0.0f64..1e-4,
        idle in 0.0f64..1e-5,
        host in 0.0f64..1e-4,
        together in any::<bool>(),
    ) {
        let machine = Machine { pipeline, bandwidth: 10e-6, ..Machine::new(4) };
        let measured = Machine { memory, latency, bandwidth, idle, host, together, ..machine.clone() };
        let comparison = compared(&machine, &measured);
        prop_assert!(comparison.whole.causes.attributed() > 0.999_999);
        for one in &comparison.cards {
            prop_assert!(one.gap.causes.attributed() > 0.999_999);
        }
    }
}
