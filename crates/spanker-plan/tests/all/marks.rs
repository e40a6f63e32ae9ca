// SPDX-License-Identifier: Apache-2.0
//! One description, several folds: prices, operators and simulated marks of the same programs agree.

use spanker_model::{Model, Quant, builtin};
use spanker_plan::{
    Activity, Audit, Conditions, Cost, Layout, Load, Mark, OPERATORS_PER_LAYER, Objective, Op,
    Part, Plan, Programs, Reach, Request, Space, Split, Step, Trace, Want, Work, load, simulate,
};
use spanker_topology::{Cluster, Profile, Shape};

fn models() -> [(&'static str, Model); 2] {
    [("smollm2-135m", Quant::Q4_1), ("tinyllama-1.1b", Quant::Q4_0)]
        .map(|(name, quant)| (name, builtin(name, quant).unwrap()))
}

fn cluster(cards: usize, shape: Shape) -> Cluster {
    Cluster::uniform(Profile::builtin("rev-a").unwrap(), cards, shape).unwrap()
}

fn plan(model: &Model, cluster: &Cluster, split: Split, groups: &[Vec<usize>]) -> Plan {
    let groups: Vec<Vec<(usize, f64)>> =
        groups.iter().map(|group| group.iter().map(|&card| (card, 1.0)).collect()).collect();
    let layout = Layout::of_groups(model, split, &groups).unwrap();
    let request = Request { context: 512, prompt: 40, ..Request::new(Objective::Latency) };
    Plan::new(model.clone(), cluster.clone(), request, layout).unwrap()
}

/// One group, one card after the other, and where there are enough cards a mixture.
fn layouts(cards: usize) -> Vec<(Split, Vec<Vec<usize>>)> {
    let all: Vec<usize> = (0..cards).collect();
    let pipeline: Vec<Vec<usize>> = all.iter().map(|&card| vec![card]).collect();
    let mut list = vec![(Split::Gather, pipeline)];
    if cards > 1 {
        list.push((Split::Gather, vec![all.clone()]));
        list.push((Split::Reduce, vec![all.clone()]));
    }
    if cards > 2 {
        let (first, rest) = all.split_at(cards / 2);
        list.push((Split::Gather, vec![first.to_vec(), rest.to_vec()]));
        list.push((Split::Reduce, vec![first.to_vec(), rest.to_vec()]));
    }
    list
}

/// How far one token without others before it looks back.
const REACH: Reach =
    Reach { read: 1, by_single: 1, by_several: 0, longest: 1, singles: 1, several: [0, 0] };

/// The program of one card for one token.
fn alone(model: &Model, cluster: &Cluster, plan: &Plan) -> Vec<Op> {
    let space = Space::of(512, 128, 1, Audit::NONE);
    let programs = Programs::symbolic(model, cluster, &plan.layout.replicas[0], space);
    let parts = [Part::new(&[0], 0, &[0], Want::Best(1))];
    programs.step(&Step::of(&parts), &|from, to| vec![from, to]).swap_remove(0)
}

#[test]
fn operators_with_a_fixed_cost_are_as_many_as_documented() {
    for (name, model) in models() {
        let cluster = cluster(1, Shape::Ring);
        let plan = plan(&model, &cluster, Split::Gather, &[vec![0]]);
        let mut starts = vec![0u32; model.layers.len() + 1];
        let (mut at, mut inside) = (0, false);
        let mut before: Option<&Work> = None;
        let program = alone(&model, &cluster, &plan);
        for op in &program {
            match op {
                Op::Mark { activity, layer } => {
                    at = *layer as usize;
                    inside = !matches!(activity, Activity::Embed | Activity::Head);
                }
                Op::Work(work) => {
                    let counts = load(work, before, &REACH).is_some_and(|load| load.starts);
                    starts[at] += u32::from(counts && inside);
                    before = Some(work);
                }
                Op::Data { .. } => {}
                other => panic!("one card has {other:?}"),
            }
        }
        assert_eq!(starts.pop(), Some(0), "{name}");
        assert!(starts.iter().all(|&count| count == OPERATORS_PER_LAYER), "{name}: {starts:?}");
    }
}

#[test]
fn price_of_one_card_is_the_sum_of_its_operators_and_of_its_simulated_marks() {
    for (name, model) in models() {
        let cluster = cluster(1, Shape::Ring);
        let plan = plan(&model, &cluster, Split::Gather, &[vec![0]]);
        let cost = Cost::of(cluster.profile(0));
        let program = alone(&model, &cluster, &plan);
        let mut before: Option<&Work> = None;
        let mut sum = 0.0;
        for op in &program {
            if let Op::Data { length, .. } = op {
                sum += cost.operator(&Load::data(*length)).total().0;
            }
            let Op::Work(work) = op else { continue };
            sum += load(work, before, &REACH).map_or(0.0, |load| cost.operator(&load).total().0);
            before = Some(work);
        }
        let trace = simulate(&plan, &Conditions::calm(1)).unwrap();
        let length = |mark: &Mark| mark.end - mark.start;
        let inside: f64 = trace.marks.iter().filter(|mark| mark.ops > 0).map(length).sum();
        let outside: f64 = trace.marks.iter().filter(|mark| mark.ops == 0).map(length).sum();
        assert!((inside / sum - 1.0).abs() < 1e-9, "{name}: {inside} against {sum}");
        let predicted = plan.predict().token.0;
        let whole = inside + outside;
        assert!((whole / predicted - 1.0).abs() < 1e-9, "{name}: {whole} against {predicted}");
        assert!((trace.tokens[0] / predicted - 1.0).abs() < 1e-9, "{name}");
    }
}

/// What is wrong with a trace's marks, if anything.
fn disorder(trace: &Trace) -> Option<String> {
    for card in 0..trace.cards as u32 {
        let marks: Vec<&Mark> = trace.marks.iter().filter(|mark| mark.card == card).collect();
        for pair in marks.windows(2) {
            if pair[1].start < pair[0].end - 1e-12 {
                return Some(format!("card {card} does two things at once: {pair:?}"));
            }
        }
        let inside: Vec<&&Mark> = marks.iter().filter(|mark| mark.ops > 0).collect();
        for pair in inside.windows(2) {
            let same = pair[0].label.token == pair[1].label.token;
            if same && pair[1].op < pair[0].op {
                return Some(format!("card {card} goes back: {pair:?}"));
            }
        }
    }
    trace.marks.iter().find_map(|mark| {
        let (whole, parts) = (mark.end - mark.start, mark.parts?.total());
        let off = (whole - parts).abs() > 1e-12 + whole * 1e-9;
        off.then(|| format!("parts add up to {parts} of {whole}: {mark:?}"))
    })
}

#[test]
fn marks_never_overlap_ascend_within_a_token_and_add_up_from_their_parts() {
    let (_, model) = &models()[0];
    for shape in [Shape::Ring, Shape::Star, Shape::Switch] {
        for cards in 1..=5 {
            for (split, groups) in layouts(cards) {
                let plan = plan(model, &cluster(cards, shape), split, &groups);
                let trace = simulate(&plan, &Conditions::calm(2)).unwrap();
                let wrong = disorder(&trace);
                assert_eq!(wrong, None, "{shape} {cards} {split:?} {groups:?}");
            }
        }
    }
}

#[test]
fn marks_that_overlap_go_back_or_do_not_add_up_are_found() {
    let (_, model) = &models()[0];
    let plan = plan(model, &cluster(2, Shape::Ring), Split::Gather, &[vec![0, 1]]);
    let trace = simulate(&plan, &Conditions::calm(1)).unwrap();
    let mut inside = (0..trace.marks.len()).filter(|&at| {
        trace.marks[at].ops > 0 && trace.marks[at].op > 1 && trace.marks[at].card == 0
    });
    let at = inside.nth(5).unwrap();
    let faults: [fn(&mut Mark); 3] = [
        |mark| mark.start -= 1e-6,
        |mark| mark.op = 0,
        |mark| mark.parts.as_mut().unwrap().waiting += 1e-6,
    ];
    for fault in faults {
        let mut planted = trace.clone();
        fault(&mut planted.marks[at]);
        assert!(disorder(&planted).is_some(), "{:?}", planted.marks[at]);
    }
}

#[test]
fn predicted_tokens_are_the_simulated_ones_for_every_split_wiring_and_number_of_cards() {
    let mut wrong = Vec::new();
    for (name, model) in models() {
        for shape in [Shape::Ring, Shape::Star, Shape::Switch] {
            for cards in 1..=5 {
                for (split, groups) in layouts(cards) {
                    let plan = plan(&model, &cluster(cards, shape), split, &groups);
                    let conditions = Conditions { record: false, ..Conditions::calm(2) };
                    let trace = simulate(&plan, &conditions).unwrap();
                    let predicted = plan.predict().token.0;
                    for token in [trace.tokens[0], trace.tokens[1] - trace.tokens[0]] {
                        let off = token / predicted - 1.0;
                        if off.abs() > 0.006 {
                            let what = format!("{name} {shape} {cards} {split:?} {groups:?}");
                            wrong.push(format!("{what}: {:+.2} %", 100.0 * off));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
