// SPDX-License-Identifier: Apache-2.0
//! The best split of TinyLlama over four rev-a cards in a ring: every candidate with its prediction, and one token of
//! the best in virtual time, which should take as long as predicted.
//!
//!     cargo run --example plan

use spanker_scheduler::planner::{
    Cluster, Conditions, Objective, Plan, Profile, Quant, Request, Shape, builtin, choose, simulate,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // What is to be split, over what, and what for: one sequence, its tokens as fast as possible.
    let model = builtin("tinyllama-1.1b", Quant::Q4_0)?;
    let cluster = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
    let request = Request::new(Objective::Latency);

    // The best layout of each kind. Candidates come best first, those that do not fit last.
    let choice = choose(&model, &cluster, &[0, 1, 2, 3], &request)?;
    println!("{:<16} {:>5} {:>10} {:>12}  fits", "strategy", "cards", "tokens/s", "first token");
    for candidate in &choice.candidates {
        let prediction = &candidate.prediction;
        println!(
            "{:<16} {:>5} {:>10.2} {:>12}  {}",
            candidate.strategy.to_string(),
            candidate.layout.cards().len(),
            prediction.tokens_per_second,
            prediction.ttft.to_string(),
            if prediction.fits() { "yes" } else { "no" },
        );
    }

    // A plan is all that it takes to simulate or run a layout; `to_json` saves it for `spanker run --plan`.
    let best = choice.best_to_run().ok_or("no layout fits these cards")?;
    let plan = Plan::new(model, cluster, request, best.layout.clone())?;

    // The simulator goes through the programs of the cards, message by message, without jitter or faults.
    let trace = simulate(&plan, &Conditions::calm(1))?;
    let predicted = plan.predict().token.millis();
    let simulated = trace.tokens[0] * 1e3;
    println!("\n{}: one token on {} cards", best.strategy, trace.cards);
    println!("predicted {predicted:.3} ms, simulated {simulated:.3} ms in {} events", trace.events);
    println!("difference {:+.3} %", 100.0 * (simulated / predicted - 1.0));
    Ok(())
}
