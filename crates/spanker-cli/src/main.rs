// SPDX-License-Identifier: Apache-2.0
//! The `spanker` command: which split of a model is fastest on which cards and why, how that runs in
//! virtual time, how fast collectives are on this machine, and emulated cards.
//!
//! Only the edges are here: flags, tables and JSON. The work is in the libraries.
// A closed pipe would be a panic: `output` writes.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod output;

mod bench;
mod cards;
mod chat;
mod cluster;
mod compare;
mod eval;
mod fetch;
mod fit;
mod flight;
mod list;
mod llm;
mod plan;
mod predict;
mod probe;
mod profiles;
mod quantize;
mod ranges;
mod ranks;
mod report;
mod run;
mod serve;
mod shell;
mod simulate;
mod steal;
mod synth;
mod times;
mod twin;
mod verify;
mod workers;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use spanker_bench::BenchError;
use spanker_engine::EngineError;
use spanker_plan::PlanError;

/// The version, the commit that it was built from and what was compiled in.
const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("SPANKER_COMMIT"),
    ", ",
    env!("SPANKER_BACKENDS"),
    ")"
);

/// Splits one model over several cards.
#[derive(Debug, Parser)]
#[command(name = "spanker", version = VERSION, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Start with:
  spanker plan tinyllama-1.1b --cards 4 --explain   the best split, how fast, and why
  spanker plan llama-2-70b --cards 8                whether it fits, and what would do
  spanker simulate plan.json --fail card2@50ms      a plan in virtual time, with a loss
  spanker compare predicted.json measured.json      where a run was slower than predicted, and why
  spanker report plan.json --out report.html        all of that as one page, with what would change it
  spanker profiles rev-a                            a card's numbers and their sources
  spanker fit --help                                models of links and cards from measurements
  spanker predict --help                            how long an all-reduce or a token takes by them
  spanker bench all-reduce --cards 4                how fast collectives are on this machine
  spanker twin up --cards 4                         emulated cards to rehearse with
  spanker cards                                     the cards that are there
  spanker probe                                     what their links take
  spanker bench all-reduce --fabric cards           how fast collectives are on them, against the prediction
  spanker probe --fabric cuda                       what the GPUs of this machine do
  mpirun -n 4 spanker bench all-reduce --fabric mpi how fast they are between processes and hosts
  spanker flight                                    what happened last on every card
  spanker steal --backends cpu:2,emul:4x,emul:1x    one job over unequal backends, whoever fails
  spanker models --fit                              the models' names, which fit here, and how fast
  spanker fetch smollm2-135m                        a small model that talks
  spanker run -m smollm2-135m -p 'Hello' --cards 3  a prompt through it, split over three cards
  spanker chat -m smollm2-135m                      a conversation with it
  spanker serve -m smollm2-135m                     the same for many at once, over HTTP
  spanker verify -m smollm2-135m --cards 1..5       proof that any number of cards gives the same tokens
  spanker eval lambada -m smollm2-135m              how well a model knows texts, in bits per byte
  spanker synth --help                              models of any size with random weights
  spanker quantize in.gguf out.gguf --type q4_0     a model with its matrices as another type
  spanker completions bash                          flags and commands for a shell
  spanker man                                       the manual page

Exit codes: 0 done, 1 failed, 2 a request that makes no sense, 3 a model or buffers that do not fit the memory,
130 interrupted. Results go to standard output, notes, progress and errors to standard error.")]
struct Cli {
    #[command(flatten)]
    manner: output::Manner,
    #[command(subcommand)]
    command: Command,
}

/// The commands: what each takes, and what does it.
macro_rules! commands {
    ($($name:ident($args:ty) => $run:path,)*) => {
        #[derive(Debug, Subcommand)]
        enum Command {
            $($name(Box<$args>),)*
        }

        fn execute(command: &Command) -> anyhow::Result<()> {
            match command {
                $(Command::$name(args) => $run(args),)*
            }
        }
    };
}

commands! {
    Run(run::Args) => run::run,
    Chat(chat::Args) => chat::run,
    Serve(serve::Args) => serve::run,
    Verify(verify::Args) => verify::run,
    Eval(eval::Args) => eval::run,
    Plan(plan::Args) => plan::run,
    Simulate(simulate::Args) => simulate::run,
    Compare(compare::Args) => compare::run,
    Report(report::Args) => report::run,
    Profiles(profiles::Args) => profiles::run,
    Fit(fit::Args) => fit::run,
    Predict(predict::Args) => predict::run,
    Cards(cards::Args) => cards::run,
    Probe(probe::Args) => probe::run,
    Bench(bench::Args) => bench::run,
    Flight(flight::Args) => flight::run,
    Steal(steal::Args) => steal::run,
    Twin(twin::Args) => twin::run,
    Worker(workers::Args) => workers::work,
    Workers(workers::ListArgs) => workers::list,
    Key(workers::KeyArgs) => workers::key,
    Models(list::Args) => list::run,
    Fetch(fetch::Args) => fetch::run,
    Synth(synth::Args) => synth::run,
    Quantize(quantize::Args) => quantize::run,
    Completions(shell::CompletionsArgs) => shell::completions,
    Man(shell::ManArgs) => shell::man,
}

/// A request that makes no sense: exit code 2, as for a flag that does not exist.
fn usage(what: impl Into<String>) -> anyhow::Error {
    EngineError::request(what).into()
}

/// The same as what comes of a command.
fn refuse<T>(what: impl Into<String>) -> anyhow::Result<T> {
    Err(usage(what))
}

/// An error of a plan: a request that makes no sense is the user's.
fn of_plan(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::Request { what } => usage(what),
        other => other.into(),
    }
}

/// Arguments with `-ts` spelled out: people know it from llama.cpp, and short flags have one letter here.
fn spelled_out(arguments: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    arguments.map(|argument| if argument == "-ts" { "--tensor-split".into() } else { argument })
}

/// Another rank has told people what went wrong: exit code 1, and not a word.
#[derive(Debug, thiserror::Error)]
#[error("another rank has said why")]
struct Unspoken;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = spelled_out(std::env::args_os()).collect();
    output::set_colours(&arguments);
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) if ranks::is_first() => error.exit(),
        Err(error) => return unspoken(u8::try_from(error.exit_code()).unwrap_or(2)),
    };
    cli.manner.set();
    let begun = std::time::Instant::now();
    let outcome = ranks::check(&cli.command).and_then(|()| execute(&cli.command));
    output::progress_done();
    let code = outcome.map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS);
    output::detail(format_args!("took {:.2} s", begun.elapsed().as_secs_f64()));
    code
}

/// Says why the command failed, and which exit code that is.
fn failed(error: &anyhow::Error) -> ExitCode {
    // Some commands write to standard output themselves, and find there that nobody reads.
    if output::is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    let code = exit_code(error);
    if error.is::<Unspoken>() || (code == USAGE && !ranks::is_first()) {
        return unspoken(code);
    }
    output::failure("", error);
    if code == USAGE {
        log!("\nFor more information, try '--help'.");
    }
    ExitCode::from(code)
}

/// The exit code of a request that makes no sense, as clap has it.
const USAGE: u8 = 2;

/// What the engine says of an error, if it is one of its own.
fn engine_error(error: &anyhow::Error) -> Option<&EngineError> {
    match error.downcast_ref() {
        Some(BenchError::Engine(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// The exit code for an error, the same in every command.
fn exit_code(error: &anyhow::Error) -> u8 {
    match engine_error(error) {
        Some(error) if error.is_interrupt() => 130,
        Some(EngineError::Request { .. }) => USAGE,
        Some(EngineError::DoesNotFit { .. }) => 3,
        _ => 1,
    }
}

/// Ends a rank for which another speaks. Launchers end all ranks when one fails: the rank that speaks goes first.
fn unspoken(code: u8) -> ExitCode {
    std::thread::sleep(std::time::Duration::from_millis(300));
    ExitCode::from(code)
}
