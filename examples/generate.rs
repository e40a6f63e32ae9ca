// SPDX-License-Identifier: Apache-2.0
//! Text from a model, on threads of this process. `cargo run --release --example generate -- model.gguf 'Once upon a time'`
//!
//! For cards, GPUs or ranks, the line that opens the host changes, and nothing else.

use spanker_engine::{Engine, EngineError, Host, Limits, Sampling, Wish, request};

fn main() -> Result<(), EngineError> {
    let mut words = std::env::args().skip(1);
    let path = words.next().unwrap_or_else(|| "model.gguf".into());
    let text = words.next().unwrap_or_else(|| "Once upon a time".into());
    let host = Host::threads(2, 1)?; // Host::cards(..), Host::gpus(1), Host::ranks(None, None)
    let model = host.open(path)?;
    if !host.leads() {
        return host.follow(&model, None); // a rank that another one leads
    }
    let context = model.trained_context().min(512);
    let prompt = model.encode(&text, true, context)?;
    let plan = host.plan(&model, &request(context, 128, prompt.len(), 32), &Wish::default())?;
    let predicted = plan.predict().tokens_per_second;
    let mut engine = Engine::load(&host, &model, plan)?;
    let mut pieces = engine.generate(&prompt, Sampling::greedy(), Limits::tokens(32))?;
    for piece in &mut pieces {
        print!("{}", piece?.text);
    }
    let (answer, _) = pieces.into_answer();
    let (_, measured) = engine.summary(&answer)?.speeds();
    println!("\n{measured:.1} tokens/s, predicted {predicted:.1}");
    Ok(())
}
