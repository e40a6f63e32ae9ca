// SPDX-License-Identifier: Apache-2.0
//! Files that are almost models, made from a number: odd shapes, odd numbers, tensors that do not belong together,
//! random weights. What makes them is here, and what runs them; what is expected of one is in the tests.

use std::sync::Arc;

use ggml_spanker::WEIGHT_TYPES;
use spanker_llm::{InProcess, LlmError, Network, Runner, Want};
use spanker_model::Quant;
use spanker_plan::{Layout, Objective, Plan, Request, Split};
use spanker_topology::{Cluster, Profile, Shape};

/// Numbers that look random (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A number below a count.
    pub fn below(&mut self, count: u64) -> u64 {
        self.roll() % count
    }

    /// True once in so many times.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// One of a list.
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
}

/// A value of a key.
#[derive(Debug, Clone, Copy)]
pub enum Field<'a> {
    /// An unsigned number.
    U32(u32),
    /// A float.
    F32(f32),
    /// A string.
    Text(&'a str),
}

/// A file before it is written. It can say things that a writer of models would refuse.
#[derive(Default)]
pub struct Sketch {
    keys: Vec<(String, Vec<u8>)>,
    /// Names, sizes (columns first) and types.
    pub tensors: Vec<(String, Vec<u64>, Quant)>,
}

impl Sketch {
    /// Sets a key, whatever it was before.
    pub fn put(&mut self, key: &str, field: Field<'_>) {
        let (kind, value) = match field {
            Field::U32(value) => (4_u32, value.to_le_bytes().to_vec()),
            Field::F32(value) => (6, value.to_le_bytes().to_vec()),
            Field::Text(text) => (8, counted(text)),
        };
        self.keys.retain(|(known, _)| known != key);
        self.keys.push((key.to_owned(), [kind.to_le_bytes().to_vec(), value].concat()));
    }

    fn tensor(&mut self, name: &str, dims: &[u64], quant: Quant) {
        self.tensors.push((name.to_owned(), dims.to_vec(), quant));
    }

    /// The bytes of the file, with random weights.
    pub fn file(&self, dice: &mut Dice) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend(counted(key));
            out.extend(value);
        }
        let mut end = 0_u64;
        for (name, dims, quant) in &self.tensors {
            out.extend(counted(name));
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(quant.ggml_id().unwrap().to_le_bytes());
            out.extend(end.to_le_bytes());
            let rows: u64 = dims.iter().skip(1).product();
            let bytes = rows * quant.row_bytes(dims.first().copied().unwrap_or(1));
            end = (end + bytes).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let wild = dice.one_in(4);
        for at in 0..end {
            // Bytes of any value make huge scales and numbers that are none; small ones make decent ones.
            let byte = dice.roll() as u8;
            out.push(if wild || at % 2 == 0 { byte } else { byte & 0x3F });
        }
        out
    }
}

fn counted(text: &str) -> Vec<u8> {
    [(text.len() as u64).to_le_bytes().to_vec(), text.as_bytes().to_vec()].concat()
}

/// A model that is sound, of any small size.
pub fn sound(dice: &mut Dice) -> Sketch {
    let architecture = dice.of(&["llama", "qwen2", "qwen3"]);
    let kv_heads = dice.of(&[1, 1, 2, 3]);
    let heads = kv_heads * dice.of(&[1, 2, 3]);
    let head_size = dice.of(&[2, 6, 8, 10, 32, 34]);
    let hidden = dice.of(&[1, 2, 5, 16, 32, 33, 96, 256]);
    let ffn = dice.of(&[1, 3, 32, 64, 160, 256, 512]);
    let (vocab, context) = (dice.of(&[1, 2, 7, 33, 70]), dice.of(&[1, 2, 3, 9, 40]));
    let layers = dice.of(&[1, 1, 2, 3]);
    let mut sketch = Sketch::default();
    sketch.put("general.architecture", Field::Text(architecture));
    for (key, size) in [
        ("block_count", layers),
        ("context_length", context),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", head_size),
        ("attention.value_length", head_size),
    ] {
        sketch.put(&format!("{architecture}.{key}"), Field::U32(size as u32));
    }
    let (q, kv) = (heads * head_size, kv_heads * head_size);
    let mut matrix = |name: &str, rows: u64, cols: u64, dice: &mut Dice| {
        let fits: Vec<Quant> =
            WEIGHT_TYPES.into_iter().filter(|quant| cols.is_multiple_of(quant.block())).collect();
        let quant = if rows == 1 || cols == 1 { Quant::F32 } else { dice.of(&fits) };
        sketch.tensor(&format!("{name}.weight"), &[cols, rows], quant);
    };
    matrix("token_embd", vocab, hidden, dice);
    if dice.one_in(2) {
        matrix("output", vocab, hidden, dice);
    }
    for layer in 0..layers {
        for (name, rows, cols) in [
            ("attn_q", q, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, q),
            ("ffn_gate", ffn, hidden),
            ("ffn_up", ffn, hidden),
            ("ffn_down", hidden, ffn),
        ] {
            matrix(&format!("blk.{layer}.{name}"), rows, cols, dice);
        }
    }
    let (biases, head_norms) = (dice.one_in(2), dice.one_in(3));
    let mut vector = |name: &str, length: u64| sketch.tensor(name, &[length], Quant::F32);
    vector("output_norm.weight", hidden);
    for layer in 0..layers {
        vector(&format!("blk.{layer}.attn_norm.weight"), hidden);
        vector(&format!("blk.{layer}.ffn_norm.weight"), hidden);
        for (name, length) in [("q", q), ("k", kv), ("v", kv)].into_iter().filter(|_| biases) {
            vector(&format!("blk.{layer}.attn_{name}.bias"), length);
        }
        for name in ["q", "k"].into_iter().filter(|_| head_norms) {
            vector(&format!("blk.{layer}.attn_{name}_norm.weight"), head_size);
        }
    }
    if dice.one_in(4) {
        vector("rope_freqs.weight", head_size / 2);
    }
    sketch
}

/// Makes one thing odd.
fn spoil(sketch: &mut Sketch, dice: &mut Dice) {
    let architecture = dice.of(&["llama", "qwen2", "qwen3"]);
    let odd = dice.of(&[0, 1, 2, 3, 5, 31, 33, 1 << 16, 1 << 22, u32::MAX]);
    let number = dice.of(&[0.0, -1.0, 1e-45, 1e38, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    let at = dice.below(sketch.tensors.len() as u64) as usize;
    match dice.below(10) {
        0 => {
            let key = dice.of(&[
                "block_count",
                "context_length",
                "embedding_length",
                "feed_forward_length",
                "attention.head_count",
                "attention.head_count_kv",
                "attention.key_length",
                "rope.dimension_count",
            ]);
            sketch.put(&format!("{architecture}.{key}"), Field::U32(odd));
        }
        1 => {
            let key = dice.of(&[
                "rope.freq_base",
                "rope.scaling.factor",
                "rope.dimension_count",
                "attention.layer_norm_rms_epsilon",
            ]);
            sketch.put(&format!("{architecture}.{key}"), Field::F32(number));
            let scaling = dice.of(&["none", "linear", "llama3", "yarn"]);
            sketch.put(&format!("{architecture}.rope.scaling.type"), Field::Text(scaling));
        }
        2 => {
            sketch.tensors.remove(at);
        }
        3 => sketch.tensors[at].1.push(dice.of(&[1, 1, 2])),
        4 => sketch.tensors[at].1.insert(0, 1),
        5 => {
            sketch.tensors[at].1.pop();
        }
        6 => sketch.tensors[at].1.reverse(),
        7 => {
            let dims = &mut sketch.tensors[at].1;
            let which = dice.below(dims.len().max(1) as u64) as usize;
            dims.iter_mut().skip(which).take(1).for_each(|dim| *dim = u64::from(odd % 100).max(1));
        }
        8 => sketch.tensors[at].2 = dice.of(&[Quant::F32, Quant::Q8_0, Quant::Q2K, Quant::F16]),
        _ => {
            let dims: &[u64] = dice.of(&[&[], &[1], &[4], &[4, 1], &[1, 4], &[2, 2]]);
            sketch.tensor(
                dice.of(&["rope_freqs.weight", "x", "blk.0.attn_q.bias"]),
                dims,
                Quant::F32,
            );
        }
    }
}

/// A plan of a network for groups of cards with their shares, or why there is none.
pub fn plan<B: AsRef<[u8]>>(
    network: &Network<B>,
    split: Split,
    groups: &[Vec<(usize, f64)>],
) -> Result<Plan, String> {
    let model = network.model();
    let layout = Layout::of_groups(model, split, groups).map_err(|error| error.to_string())?;
    let cards = groups.iter().map(Vec::len).sum();
    let cluster = Cluster::uniform(Profile::builtin("rev-a").unwrap(), cards, Shape::Switch);
    let context = model.context;
    let request = Request {
        context,
        prompt: 1,
        position: 0,
        kv: Quant::F16,
        ..Request::new(Objective::Latency)
    };
    Plan::new(model.clone(), cluster.unwrap(), request, layout).map_err(|error| error.to_string())
}

fn logits(
    network: &Arc<Network<Vec<u8>>>,
    plan: &Plan,
    tokens: &[u32],
    batch: usize,
) -> Result<Vec<u32>, LlmError> {
    let context = network.model().context.min(40) as usize;
    let mut runner = InProcess::new(Arc::clone(network), plan, context, batch, 2)?;
    let mut all = Vec::new();
    for (at, tokens) in tokens.chunks(batch).enumerate() {
        let outcome = runner.step_alone(tokens, at * batch, Want::Logits)?;
        // One number that is none is as good as another.
        let bits = |value: f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
        let logits = outcome.last().logits.clone().unwrap();
        all.extend(logits.into_iter().map(bits));
        let best = runner.step_alone(tokens, at * batch, Want::Best(5))?;
        assert!(best.last().best.len() <= 5);
    }
    Ok(all)
}

/// Opens and runs the file that a number makes, with some bytes replaced. Panics if anything of the model's does.
/// Says whether a step was run.
pub fn tried(seed: u64, patches: &[(u16, u8)]) -> bool {
    let mut dice = Dice(seed);
    let mut sketch = sound(&mut dice);
    for _ in 0..dice.of(&[0, 0, 1, 1, 2]) {
        spoil(&mut sketch, &mut dice);
    }
    if sketch.tensors.iter().map(|(_, dims, _)| dims.iter().product::<u64>()).sum::<u64>() > 1 << 20
    {
        return false;
    }
    let mut file = sketch.file(&mut dice);
    for &(at, byte) in patches {
        let at = usize::from(at) % file.len();
        file[at] = byte;
    }
    tried_file(file, &mut dice)
}

/// Opens a file and runs it on one card and on several. Panics if anything of the model's does. Says whether a step was
/// run.
pub fn tried_file(file: Vec<u8>, dice: &mut Dice) -> bool {
    let Ok(network) = Network::new(file) else { return false };
    let network = Arc::new(network);
    let (most, context) = match dice.one_in(8) {
        true => (71, 5),
        false => (network.model().vocab, network.model().context),
    };
    let count = dice.of(&[1, 2, 3, 5]).min(context);
    let tokens: Vec<u32> = (0..count).map(|_| dice.below(most) as u32).collect();
    let batch = dice.of(&[1, 2, 16]);
    let one = plan(&network, Split::Gather, &[vec![(0, 1.0)]]).unwrap();
    let reference = logits(&network, &one, &tokens, batch);
    if let Err(LlmError::Panicked { .. }) = reference {
        panic!("one card panicked");
    }
    let cards = dice.of(&[2, 3, 4, 7]);
    let share = |dice: &mut Dice| dice.of(&[1.0, 1.0, 0.1, 3.0, 1e-300, 1e308, f64::MIN_POSITIVE]);
    let shares: Vec<(usize, f64)> = (0..cards).map(|card| (card, share(dice))).collect();
    let split = dice.of(&[Split::Gather, Split::Gather, Split::Reduce]);
    let groups = match dice.below(3) {
        0 => shares.chunks(1).map(<[_]>::to_vec).collect(),
        1 => shares.chunks(2).map(<[_]>::to_vec).collect(),
        _ => vec![shares],
    };
    let Ok(plan) = plan(&network, split, &groups) else { return reference.is_ok() };
    match (reference, logits(&network, &plan, &tokens, batch)) {
        (_, Err(LlmError::Panicked { card })) => panic!("card {card} panicked"),
        (Ok(one), Ok(many)) if split == Split::Gather => assert_eq!(one, many),
        (Ok(_), Err(error)) => panic!("one card runs what several do not: {error}"),
        (Err(_), Ok(_)) => panic!("several cards run what one does not"),
        (Err(_), Err(_)) => return false,
        _ => {}
    }
    true
}
