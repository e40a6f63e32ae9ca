// SPDX-License-Identifier: Apache-2.0
//! The `spanker` command: what cards are there, how fast collectives between them are, and how long a
//! token will take.
//!
//! Only the edges are here: flags, tables and JSON. The work is in the libraries.

mod bench;
mod cards;
mod files;
mod fit;
mod model;
mod output;
mod predict;
mod sizes;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Splits one model over several cards.
#[derive(Debug, Parser)]
#[command(name = "spanker", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Start with:
  spanker cards --mock 4               what a group of four mock cards looks like
  spanker bench all-reduce --cards 4   how fast collectives are on this machine
  spanker fit --help                   models of links and cards from measurements
  spanker predict --help               how long an all-reduce or a token takes by them")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Cards(cards::Args),
    Bench(bench::Args),
    Fit(fit::Args),
    Predict(predict::Args),
}

/// A request that makes no sense: exit code 2, as for a flag that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Cards(args) => cards::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Fit(args) => fit::run(&args),
        Command::Predict(args) => predict::run(&args),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if output::is_closed_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {error:#}");
    match error.downcast_ref::<Usage>() {
        Some(_) => {
            eprintln!("\nFor more information, try '--help'.");
            ExitCode::from(2)
        }
        None => ExitCode::FAILURE,
    }
}
