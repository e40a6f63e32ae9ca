// SPDX-License-Identifier: Apache-2.0
//! The simulator: it agrees with the closed form where that is exact, repeats from a seed, and goes on after
//! a loss.

use proptest::prelude::*;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{
    Activity, BufferId, Candidate, Conditions, Fault, Objective, Origin, Picks, Place, Plan, Reach,
    Request, Slow, Trace, Work, choose, load, simulate,
};
use spanker_topology::{BytesPerSecond, Cluster, Profile, Seconds, Shape};

fn tinyllama() -> Model {
    builtin("tinyllama-1.1b", Quant::Q4_0).unwrap()
}

fn cluster(profile: &str, cards: usize, shape: Shape) -> Cluster {
    Cluster::uniform(Profile::builtin(profile).unwrap(), cards, shape).unwrap()
}

fn candidates(model: &Model, cluster: &Cluster, request: &Request) -> Vec<Candidate> {
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    choose(model, cluster, &cards, request).unwrap().candidates
}

fn plan(model: &Model, cluster: &Cluster, request: &Request, candidate: &Candidate) -> Plan {
    let layout = candidate.layout.clone();
    Plan::new(model.clone(), cluster.clone(), request.clone(), layout).unwrap()
}

fn best(cluster: &Cluster, request: &Request) -> Plan {
    let model = tinyllama();
    plan(&model, cluster, request, &candidates(&model, cluster, request)[0])
}

/// The mean time of a token after the pipeline has filled.
fn steady(trace: &Trace) -> f64 {
    let (first, last) = (trace.tokens.len() / 2, trace.tokens.len() - 1);
    (trace.tokens[last] - trace.tokens[first]) / (last - first) as f64
}

/// Layers of Qwen3-30B-A3B.
fn mixture(layers: usize) -> Model {
    let mut model = builtin("qwen3-30b-a3b", Quant::Q4_0).unwrap();
    model.layers.truncate(layers);
    model
}

#[test]
fn four_cards_decode_a_mixture_3_6_times_as_fast_as_one_and_the_simulation_agrees() {
    let model = mixture(4);
    let request = Request::new(Objective::Latency);
    let token = |cards: usize| {
        let cluster = cluster("rev-a", cards, Shape::Ring);
        let candidate = &candidates(&model, &cluster, &request)[0];
        assert_eq!(candidate.layout.cards().len(), cards);
        let plan = plan(&model, &cluster, &request, candidate);
        let trace = simulate(&plan, &Conditions::calm(2)).unwrap();
        let predicted = candidate.prediction.token.0;
        assert!((trace.tokens[0] / predicted - 1.0).abs() < 0.02, "{cards}");
        predicted
    };
    let (one, four) = (token(1), token(4));
    assert!(one / four > 3.6, "{}", one / four);
}

#[test]
fn batches_of_a_mixture_read_the_experts_that_they_are_expected_to_meet() {
    let at = |buffer| Place { buffer: BufferId(buffer), offset: 0 };
    let picks = Picks { at: at(3), used: 8, experts: 128 };
    let counted = |rows: u64| {
        let (a, b, out, shape) = (at(0), at(1), at(2), [rows, 2048, 768]);
        let (types, stride, apart) = ([8, 2], 768 * 1152, false);
        let work = Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart };
        load(&work, None, &Reach::default()).unwrap()
    };
    for (rows, experts) in [(1, 8), (2, 16), (4, 29), (16, 82), (1000, 128)] {
        let load = counted(rows);
        assert_eq!(load.units, experts * 768 * 1152, "{rows}");
        assert_eq!(load.macs, rows * 8 * 768 * 2048);
        assert_eq!(load.rows, (rows * 8).div_ceil(experts));
    }
}

#[test]
fn simulated_latency_agrees_with_the_prediction_where_nothing_is_shared() {
    let model = tinyllama();
    for (profile, cards, shape) in [
        ("rev-a", 1, Shape::Ring),
        ("rev-a", 2, Shape::PointToPoint),
        ("rev-a", 3, Shape::Ring),
        ("rev-a", 4, Shape::Ring),
        ("rev-a", 4, Shape::Mesh),
        ("rev-a", 5, Shape::Switch),
        ("rpi5-gbe", 4, Shape::Switch),
        ("h200-nvlink", 8, Shape::Switch),
    ] {
        let cluster = cluster(profile, cards, shape);
        let request = Request::new(Objective::Latency);
        for candidate in candidates(&model, &cluster, &request) {
            let plan = plan(&model, &cluster, &request, &candidate);
            let trace = simulate(&plan, &Conditions::calm(2)).unwrap();
            let predicted = candidate.prediction.token.0;
            for (token, simulated) in
                [trace.tokens[0], trace.tokens[1] - trace.tokens[0]].into_iter().enumerate()
            {
                let off = simulated / predicted - 1.0;
                assert!(
                    off.abs() < 0.01,
                    "{profile} {cards} {shape} {} token {token}: {off:+.4}",
                    candidate.strategy
                );
            }
        }
    }
}

#[test]
fn simulated_throughput_and_first_token_agree_with_the_prediction() {
    let model = tinyllama();
    let cluster = cluster("rev-a", 4, Shape::Ring);
    for objective in [Objective::Throughput, Objective::Ttft] {
        let request = Request { sequences: 4, ..Request::new(objective) };
        for candidate in candidates(&model, &cluster, &request) {
            let plan = plan(&model, &cluster, &request, &candidate);
            let predicted = &candidate.prediction;
            let (simulated, expected) = match objective {
                Objective::Throughput => {
                    let trace = simulate(&plan, &Conditions::calm(12)).unwrap();
                    (4.0 / steady(&trace), predicted.tokens_per_second)
                }
                _ => {
                    let conditions = Conditions { prompt: true, ..Conditions::calm(1) };
                    let trace = simulate(&plan, &conditions).unwrap();
                    (trace.incidents[0].at, predicted.ttft.0)
                }
            };
            let off = simulated / expected - 1.0;
            assert!(off.abs() < 0.01, "{objective} {}: {off:+.4}", candidate.strategy);
        }
    }
}

#[test]
fn the_host_in_the_middle_is_a_bottleneck_in_both() {
    let cluster = cluster("rev-a-gbe-only", 4, Shape::Star);
    let request = Request::new(Objective::Latency);
    let plan = best(&cluster, &request);
    let simulated = simulate(&plan, &Conditions::calm(1)).unwrap().tokens[0];
    let predicted = plan.predict().token.0;
    // The formula starts every exchange when all ranks are ready; those that are early overlap.
    assert!((0.9..1.001).contains(&(simulated / predicted)), "{simulated} against {predicted}");
    let alone = best(&self::cluster("rev-a-gbe-only", 1, Shape::Star), &request).predict().token.0;
    assert!(predicted < alone / 2.0, "and still four cards are worth it");
}

#[test]
fn a_killed_card_leads_to_a_new_plan_and_the_trace_shows_it() {
    let cluster = cluster("rev-a", 4, Shape::Ring);
    let plan = best(&cluster, &Request::new(Objective::Latency));
    let fault = Fault::Card { card: 2, at: Seconds(0.050) };
    let conditions = Conditions { faults: vec![fault], ..Conditions::calm(3) };
    let trace = simulate(&plan, &conditions).unwrap();
    assert_eq!(trace.tokens.len(), 3, "all tokens are there in the end");
    let story: Vec<&str> = trace.incidents.iter().map(|incident| incident.what.as_str()).collect();
    assert_eq!(story[0], "card 2 dies");
    assert!(story[1].contains("new plan") && story[1].contains("[0, 1, 3]"), "{story:?}");
    let died = trace.incidents[0].at;
    let late = trace.marks.iter().filter(|mark| mark.card == 2 && mark.end > died + 1e-12);
    assert_eq!(late.count(), 0, "a dead card does nothing");
    for activity in [Activity::Stall, Activity::Reload] {
        assert!(trace.marks.iter().any(|mark| mark.label.activity == activity));
    }
    // Afterwards three cards do what three cards do.
    let three = best(&self::cluster("rev-a", 3, Shape::Ring), &Request::new(Objective::Latency));
    let last = trace.tokens[2] - trace.tokens[1];
    let expected = three.predict().token.0;
    assert!((last / expected - 1.0).abs() < 0.02, "{last} against {expected}");
}

#[test]
fn a_cut_link_sends_messages_the_other_way_round() {
    let cluster = cluster("rev-a", 4, Shape::Ring);
    let plan = best(&cluster, &Request::new(Objective::Latency));
    let fault = Fault::Link { from: 1, to: 2, at: Seconds(0.010) };
    let conditions = Conditions { faults: vec![fault], ..Conditions::calm(2) };
    let trace = simulate(&plan, &conditions).unwrap();
    assert_eq!(trace.tokens.len(), 2);
    assert!(trace.incidents[0].what.contains("link 1-2"));
    assert!(trace.incidents[1].what.contains("new plan"));
}

#[test]
fn a_loss_that_leaves_too_little_memory_ends_the_run_with_a_reason() {
    let model = builtin("llama-2-7b", Quant::Q4_0).unwrap();
    let cluster = cluster("rev-a", 2, Shape::PointToPoint);
    let request = Request::new(Objective::Latency);
    let plan = plan(&model, &cluster, &request, &candidates(&model, &cluster, &request)[0]);
    let fault = Fault::Card { card: 0, at: Seconds(0.5) };
    let conditions = Conditions { faults: vec![fault], ..Conditions::calm(2) };
    let trace = simulate(&plan, &conditions).unwrap();
    assert_eq!(trace.tokens.len(), 0);
    assert!(trace.incidents.last().unwrap().what.contains("does not fit on the 1 cards"));
}

#[test]
fn slow_cards_bit_errors_and_jitter_cost_time_and_repeat_from_their_seed() {
    let cluster = cluster("rev-a", 4, Shape::Ring);
    let plan = best(&cluster, &Request::new(Objective::Latency));
    let time = |conditions: &Conditions| simulate(&plan, conditions).unwrap().tokens[0];
    let calm = time(&Conditions::calm(1));
    let slow = Slow { card: 1, factor: 1.5, from: Seconds::ZERO };
    let slowed = time(&Conditions { slow: vec![slow], ..Conditions::calm(1) });
    assert!((1.3..1.55).contains(&(slowed / calm)), "{}", slowed / calm);
    let with_errors =
        |seed| time(&Conditions { bit_error_rate: 1e-6, seed, ..Conditions::calm(1) });
    assert!(with_errors(1) > calm);
    assert_eq!(with_errors(1), with_errors(1));
    assert_ne!(with_errors(1), with_errors(2));
    let jittered = |seed| time(&Conditions { jitter: 0.1, seed, ..Conditions::calm(1) });
    assert!((1.0..1.1).contains(&(jittered(7) / calm)));
    assert_eq!(jittered(7), jittered(7));
}

#[test]
fn bit_errors_cost_what_the_link_model_says() {
    // One large message at a time: the mean over many frames is the formula's.
    let cluster = cluster("rev-a", 2, Shape::PointToPoint);
    let request = Request { prompt: 512, ..Request::new(Objective::Ttft) };
    let plan = best(&cluster, &request);
    let exchanged = |rate: f64| {
        let conditions = Conditions { prompt: true, bit_error_rate: rate, ..Conditions::calm(1) };
        let trace = simulate(&plan, &conditions).unwrap();
        let spent = trace
            .marks
            .iter()
            .filter(|mark| mark.card == 0 && mark.label.activity == Activity::Exchange);
        spent.map(|mark| mark.end - mark.start).sum::<f64>()
    };
    let link = cluster.profile(0).link.clone().unwrap();
    let framing = link.framing.unwrap();
    let goodput = |rate| framing.goodput(link.bandwidth.value, rate, link.round_trip.value);
    let expected = goodput(0.0) / goodput(1e-5);
    let actual = exchanged(1e-5) / exchanged(0.0);
    assert!((actual / expected - 1.0).abs() < 0.10, "{actual} against {expected}");
}

#[test]
fn conditions_that_make_no_sense_are_refused_with_the_value() {
    let plan = best(&cluster("rev-a", 2, Shape::PointToPoint), &Request::new(Objective::Latency));
    let fault = Fault::Card { card: 9, at: Seconds::ZERO };
    let link = Fault::Link { from: 0, to: 7, at: Seconds::ZERO };
    let slow = Slow { card: 0, factor: -1.0, from: Seconds::ZERO };
    for (conditions, named) in [
        (Conditions::calm(0), "0 tokens"),
        (Conditions { faults: vec![fault], ..Conditions::calm(1) }, "no card 9"),
        (Conditions { faults: vec![link], ..Conditions::calm(1) }, "no link 0-7"),
        (Conditions { slow: vec![slow], ..Conditions::calm(1) }, "-1 times"),
        (Conditions { jitter: f64::NAN, ..Conditions::calm(1) }, "NaN"),
        (Conditions { bit_error_rate: 0.5, ..Conditions::calm(1) }, "0.5"),
    ] {
        let error = simulate(&plan, &conditions).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn traces_open_in_perfetto_and_in_a_terminal() {
    let plan = best(&cluster("rev-a", 3, Shape::Ring), &Request::new(Objective::Latency));
    let fault = Fault::Card { card: 1, at: Seconds(0.020) };
    let conditions = Conditions { faults: vec![fault], ..Conditions::calm(2) };
    let trace = simulate(&plan, &conditions).unwrap();
    let json: serde_json::Value =
        serde_json::from_str(&trace.to_perfetto(Origin::Predicted)).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|event| event["ph"] == "X" && event["name"] == "exchange"));
    assert!(events.iter().any(|event| event["ph"] == "i" && event["name"] == "card 1 dies"));
    assert!(events.iter().any(|event| event["args"]["name"] == "card 2"));
    let chart = trace.to_chart(60);
    assert_eq!(chart.lines().count(), 4);
    assert!(chart.lines().nth(1).unwrap().contains('#') && chart.contains('r'), "{chart}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_fault_at_any_time_leaves_a_trace_in_order(
        cards in 2usize..5,
        shape in prop::sample::select(vec![Shape::Ring, Shape::Switch, Shape::Star]),
        faults in prop::collection::vec((0usize..5, 0.0f64..0.4), 1..4),
        rates in prop::collection::vec(500u64..3000, 5),
        objective in prop::sample::select(Objective::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let profiles = (0..cards).map(|card| {
            let rate = BytesPerSecond(rates[card] * 1_000_000);
            Profile::builtin("rev-a").unwrap().with_memory_bandwidth(rate, "test")
        });
        let cluster = Cluster::new(profiles.collect(), shape).unwrap();
        let request = Request { sequences: 2, prompt: 16, ..Request::new(objective) };
        let plan = best(&cluster, &request);
        let faults = faults.iter().filter(|(card, _)| *card < cards);
        let faults = faults.map(|&(card, at)| Fault::Card { card, at: Seconds(at) }).collect();
        let conditions = Conditions { faults, seed, jitter: 0.05, ..Conditions::calm(3) };
        let trace = simulate(&plan, &conditions).unwrap();
        prop_assert_eq!(&trace, &simulate(&plan, &conditions).unwrap());
        prop_assert!(trace.tokens.is_sorted());
        prop_assert!(trace.marks.iter().all(|mark| mark.end >= mark.start));
        // Either all tokens are there, or the last incident says why not.
        if trace.tokens.len() < 3 {
            let last = &trace.incidents.last().unwrap().what;
            prop_assert!(last.contains("does not fit") || last.contains("nobody"), "{}", last);
        }
        // No card does two things at once.
        for card in 0..cards as u32 {
            let mut marks: Vec<_> = trace.marks.iter().filter(|mark| mark.card == card).collect();
            marks.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end)));
            for pair in marks.windows(2) {
                prop_assert!(pair[1].start >= pair[0].end - 1e-9, "{:?}", pair);
            }
        }
    }
}
