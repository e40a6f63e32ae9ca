// SPDX-License-Identifier: Apache-2.0
//! The tables of `docs/decision.md`: the first version's answers beside what both splits take.

use spanker_collective::Algorithm;
use spanker_model::{Matrix, Model, Quant, builtin};
use spanker_plan::formula::{
    ACTIVATION, Decode, Link, all_reduce, break_even_alpha, layer_split_streams, layer_split_token,
    tensor_parallel_token,
};
use spanker_scheduler::{Strategy, TileShape, pick_strategy};
use spanker_test_support::tables::{self, table};
use spanker_topology::{Profile, Seconds};

const MODELS: [&str; 3] = ["tinyllama-1.1b", "llama-2-7b", "llama-2-70b"];
const CARDS: [usize; 3] = [2, 4, 8];

/// The reference card.
struct Card {
    profile: Profile,
    link: Link,
    memory_rate: f64,
}

fn card() -> Card {
    let profile = Profile::builtin("rev-a").unwrap();
    let link = Link::of(profile.link.as_ref().unwrap());
    let memory_rate = profile.memory.bandwidth.value.0 as f64;
    Card { profile, link, memory_rate }
}

impl Card {
    fn decode(&self, model: &Model) -> Decode {
        Decode {
            read: model.read_per_token() as f64,
            layers: model.layers.len() as u64,
            hidden: model.hidden,
            memory_rate: self.memory_rate,
        }
    }

    /// What the first version says about a matrix at decode, with 16-bit elements as in its tests.
    fn origin(&self, matrix: &Matrix, cards: usize) -> Strategy {
        let tile = TileShape { m: 1, n: matrix.rows, k: matrix.cols, bytes_per_element: 2 };
        let link = self.profile.link.as_ref().unwrap().bandwidth.value.0;
        pick_strategy(&tile, cards as u64, self.profile.memory.bandwidth.value.0, link)
    }
}

fn short(strategy: Strategy) -> &'static str {
    match strategy {
        Strategy::TensorParallel => "tensor",
        Strategy::ModelParallel => "layers",
        other => panic!("{other:?} has no name"),
    }
}

fn faster(tensor: Seconds, layers: Seconds) -> String {
    if tensor.0 <= layers.0 { "tensor" } else { "layers" }.to_owned()
}

/// Three significant digits.
fn digits(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn model(name: &str) -> Model {
    builtin(name, Quant::Q4_0).unwrap()
}

/// Single matrices on four cards.
fn matrices() -> String {
    let card = card();
    let cards = 4;
    let pick: [(&str, &[&str]); 2] =
        [("tinyllama-1.1b", &["q", "k", "o", "up", "down"]), ("llama-2-70b", &["k", "up", "down"])];
    let rows = pick.into_iter().flat_map(|(name, wanted)| {
        let model = model(name);
        let layer = model.layers[0];
        let chosen = layer.matrices().into_iter().filter(|(part, _)| wanted.contains(part));
        let rows = chosen.map(|(part, matrix)| {
            // Only what is split by inputs leaves sums that have to be reduced.
            let reduces = ["o", "down"].contains(&part);
            let bytes = matrix.rows as f64 * ACTIVATION;
            let exchange = match reduces {
                true => all_reduce(Algorithm::Ring, cards, bytes, card.link),
                false => Seconds::ZERO,
            };
            let read = Seconds(matrix.bytes() as f64 / card.memory_rate);
            let split = read / cards as f64 + exchange;
            let claimed = 2 * matrix.cols;
            let times = matrix.bytes() as f64 / claimed as f64;
            vec![
                format!("{name} {part}"),
                matrix.rows.to_string(),
                matrix.cols.to_string(),
                short(card.origin(matrix, cards)).to_owned(),
                claimed.to_string(),
                matrix.bytes().to_string(),
                format!("{times:.0}"),
                digits(split.micros()),
                digits(read.micros()),
                faster(split, read),
            ]
        });
        rows.collect::<Vec<_>>()
    });
    table(
        &[
            "matrix",
            "n",
            "k",
            "formula says",
            "bytes by the formula",
            "bytes read, Q4_0",
            "times more",
            "split, us",
            "on one card, us",
            "faster",
        ],
        rows,
    )
}

/// How many of a model's matrices the first version would split, of one layer and the head.
fn verdict(card: &Card, model: &Model, cards: usize) -> String {
    let layer = model.layers[0];
    let all = layer.matrices().into_iter().map(|(_, matrix)| matrix).chain([&model.head]);
    let says = all.map(|matrix| card.origin(matrix, cards));
    let tensor = says.filter(|strategy| *strategy == Strategy::TensorParallel).count();
    match tensor {
        0 => "layers".to_owned(),
        8 => "tensor".to_owned(),
        some => format!("{some} of 8 tensor"),
    }
}

fn models() -> String {
    let card = card();
    let rows = MODELS.into_iter().flat_map(|name| {
        let model = model(name);
        let decode = card.decode(&model);
        let card = &card;
        CARDS.map(|cards| {
            let tensor = tensor_parallel_token(decode, cards, card.link);
            let layers = layer_split_token(decode, cards, card.link);
            let room = card.profile.usable().0 * cards as u64;
            vec![
                name.to_owned(),
                cards.to_string(),
                verdict(card, &model, cards),
                faster(tensor, layers),
                digits(tensor.millis()),
                digits(layers.millis()),
                format!("{:.1}", layers.0 / tensor.0),
                digits(1.0 / tensor.0),
                digits(layer_split_streams(decode, cards, card.link, cards)),
                if model.weight_bytes() <= room { "yes" } else { "no" }.to_owned(),
            ]
        })
    });
    table(
        &[
            "model, Q4_0",
            "cards",
            "formula says",
            "faster, one stream",
            "tensor, ms",
            "layers, ms",
            "times slower",
            "tensor, tok/s",
            "layers with a stream for each card, tok/s",
            "weights fit",
        ],
        rows,
    )
}

fn break_even() -> String {
    let card = card();
    let rows = MODELS.map(|name| {
        let decode = card.decode(&model(name));
        let mut row = vec![name.to_owned()];
        row.extend(CARDS.map(|cards| {
            break_even_alpha(decode, cards, card.link).expect("several cards").to_string()
        }));
        row
    });
    table(&["model, Q4_0", "2 cards", "4 cards", "8 cards"], rows)
}

#[test]
fn tables_of_the_decision_are_what_the_formulas_give() {
    tables::check(
        "decision.md",
        &[("matrices", matrices()), ("models", models()), ("break-even", break_even())],
    );
}

#[test]
fn splitting_every_matrix_is_faster_for_every_model_and_card_count_of_the_tables() {
    let card = card();
    for name in MODELS {
        let decode = card.decode(&model(name));
        for cards in CARDS {
            let tensor = tensor_parallel_token(decode, cards, card.link);
            assert!(tensor.0 < layer_split_token(decode, cards, card.link).0, "{name} on {cards}");
        }
    }
}
