// SPDX-License-Identifier: Apache-2.0
//! The `spanker` command: which split of a model is fastest on which cards and why, how that runs in
//! virtual time, how fast collectives are on this machine, and emulated cards.
//!
//! Only the edges are here: flags, tables and JSON. The work is in the libraries.
// A closed pipe would be a panic: `output` writes.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod cards;
mod chat;
mod cluster;
mod compare;
mod directory;
mod eval;
mod fault;
mod fetch;
mod fit;
mod flight;
#[cfg(test)]
mod hints;
mod list;
mod llm;
mod output;
mod plan;
mod predict;
mod probe;
mod profiles;
mod quantize;
mod ranks;
mod report;
mod run;
mod serve;
mod shell;
mod simulate;
mod sizes;
mod steal;
mod synth;
mod twin;
mod verify;
mod workers;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use spanker_engine::EngineError;

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

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Chat(Box<chat::Args>),
    Serve(Box<serve::Args>),
    Verify(Box<verify::Args>),
    Eval(Box<eval::Args>),
    Plan(plan::Args),
    Simulate(simulate::Args),
    Compare(compare::Args),
    Report(report::Args),
    Profiles(profiles::Args),
    Fit(fit::Args),
    Predict(predict::Args),
    Cards(cards::Args),
    Probe(probe::Args),
    Bench(bench::Args),
    Flight(flight::Args),
    Steal(Box<steal::Args>),
    Twin(twin::Args),
    Worker(workers::Args),
    Workers(workers::ListArgs),
    Key(workers::KeyArgs),
    Models(list::Args),
    Fetch(fetch::Args),
    Synth(Box<synth::Args>),
    Quantize(quantize::Args),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

/// A request that makes no sense: exit code 2, as for a flag that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// Something does not fit the memory that there is: exit code 3.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct DoesNotFit(String);

/// The user has had enough: exit code 130, as for a program that the interrupt ended.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct Interrupted;

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
    let cli = match parse(&arguments) {
        Ok(cli) => cli,
        Err(error) if ranks::is_first() => error.exit(),
        Err(error) => return unspoken(u8::try_from(error.exit_code()).unwrap_or(2)),
    };
    cli.manner.set();
    let begun = std::time::Instant::now();
    let outcome = ranks::check(&cli.command).and_then(|()| execute(cli.command));
    output::progress_done();
    let code = outcome.map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS);
    output::detail(format_args!("took {:.2} s", begun.elapsed().as_secs_f64()));
    code
}

fn parse(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let command = Cli::command().color(output::Color::asked(arguments));
    Cli::from_arg_matches(&command.try_get_matches_from(arguments)?)
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
    output::error(format_args!("{error:#}"));
    if let Some(hint) = error.downcast_ref::<EngineError>().and_then(EngineError::hint) {
        let _ = writeln!(std::io::stderr(), "hint: {hint}");
    }
    if code == USAGE {
        // That nobody reads it changes nothing.
        let _ = writeln!(std::io::stderr(), "\nFor more information, try '--help'.");
    }
    ExitCode::from(code)
}

/// The exit code of a request that makes no sense, as clap has it.
const USAGE: u8 = 2;

/// The exit code for an error, the same in every command.
fn exit_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<EngineError>() {
        Some(error) if error.is_interrupt() => return 130,
        Some(EngineError::Request { .. }) => return USAGE,
        Some(EngineError::DoesNotFit { .. }) => return 3,
        _ => {}
    }
    match error {
        error if error.is::<Usage>() => USAGE,
        error if error.is::<DoesNotFit>() => 3,
        error if error.is::<Interrupted>() => 130,
        _ => 1,
    }
}

/// Ends a rank for which another speaks. Launchers end all ranks when one fails: the rank that speaks goes first.
fn unspoken(code: u8) -> ExitCode {
    std::thread::sleep(std::time::Duration::from_millis(300));
    ExitCode::from(code)
}

fn execute(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Profiles(args) => profiles::run(&args),
        Command::Fit(args) => fit::run(&args),
        Command::Predict(args) => predict::run(&args),
        Command::Cards(args) => cards::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Flight(args) => flight::run(&args),
        Command::Steal(args) => steal::run(&args),
        Command::Twin(args) => twin::run(&args),
        Command::Worker(args) => workers::work(&args),
        Command::Workers(args) => workers::list(&args),
        Command::Key(args) => workers::key(&args),
        Command::Models(args) => list::run(&args),
        Command::Fetch(args) => fetch::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Completions(args) => shell::completions(&args),
        Command::Man(args) => shell::man(&args),
    }
}
