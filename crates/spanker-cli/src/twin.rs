// SPDX-License-Identifier: Apache-2.0
//! `spanker twin`: emulated cards to rehearse with. Processes, links and directories are the library's.

mod show;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use spanker_runtime::AbiVersion;
use spanker_twin::control::{self, Answer, Ending, Request, Target};
use spanker_twin::supervisor::{self, News, Program, TwinSpec};
use spanker_twin::{MOST_CARDS, Pace, Signals, TwinError, home, specs};

use crate::cluster::ClusterArgs;
use crate::{Usage, output};

/// Rehearse with emulated cards: one process each, with links between them
///
/// The cards answer in a directory, as the driver's answer in /dev: $SPANKER_DEV_DIR if that is set, or
/// 'spanker' in $XDG_RUNTIME_DIR, or /tmp/spanker-UID. A supervisor in the background starts and watches them.
/// However it ends, no process, socket or file of the twin is left.
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
#[command(after_help = "A rehearsal:
  spanker twin up --cards 4          four cards in a ring
  spanker twin kill 2                one of them dies
  spanker twin cut 0-1               a cable is cut
  spanker twin status                what is left
  spanker twin restore               everything is well again
  spanker twin down                  nothing is left")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Up(Box<Up>),
    /// Show every card and link
    ///
    /// A card is up, dead, stopped or silent; a link is up, training, down, at fault or cut.
    Status {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Kill a card, as SIGKILL does
    ///
    /// Its socket stays, so that programs see a card that is dead and not one that never was.
    Kill {
        /// The card's number
        card: u32,
    },
    /// Cut the link between two cards
    Cut {
        /// The two cards, as in 0-1
        #[arg(value_name = "A-B", value_parser = link)]
        link: (u32, u32),
    },
    /// Flip bits on the link between two cards
    Corrupt {
        /// The two cards, as in 0-1
        #[arg(value_name = "A-B", value_parser = link)]
        link: (u32, u32),
        /// The chance that a line bit flips: 0 up to 0.5
        #[arg(long, value_name = "RATE", value_parser = bit_error_rate)]
        ber: f64,
    },
    /// Let a card take several times as long for everything
    Slow {
        /// The card's number
        card: u32,
        /// How many times as long: 1 to 1000000
        #[arg(long, value_name = "TIMES", value_parser = factor)]
        factor: f64,
    },
    /// Let a card answer but do no more work
    Stick {
        /// The card's number
        card: u32,
    },
    /// Stop a card, as SIGSTOP does: it does not answer at all
    Stop {
        /// The card's number
        card: u32,
    },
    /// Let a card compute garbage
    Garble {
        /// The card's number
        card: u32,
    },
    /// Put a card, a link or everything right again
    ///
    /// Stopped, stuck, slow and garbling cards go on as before; dead ones are started again, empty, on new
    /// links; cut and corrupting links become whole.
    Restore {
        /// A card's number or a link as in 0-1 [default: everything]
        #[arg(value_name = "N|A-B", value_parser = target)]
        what: Option<Target>,
    },
    /// Take the twin down
    ///
    /// Succeeds if there is none. Stopped cards are killed, and so is a supervisor that does not answer.
    Down,
    #[command(hide = true)]
    Keeper {
        dir: PathBuf,
    },
    #[command(hide = true)]
    Card {
        dir: PathBuf,
        index: u32,
    },
}

/// Start a twin and return when every card answers and every link is up
#[derive(Debug, clap::Args)]
#[command(after_help = "Then:
  export SPANKER_DEV_DIR=DIR        as 'up' prints it, for programs that look for cards
  spanker twin status               every card and link")]
struct Up {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// How fast cards are: 'card' works as fast as it can and keeps card time by the profile, 'wall'
    /// takes as long as the profile says
    #[arg(long, default_value = "card", value_parser = pace)]
    pace: Pace,
    /// Work as fast as possible, with no profile's speed: card time is wall time
    #[arg(long, conflicts_with = "pace")]
    unshaped: bool,
    /// Where randomness begins: serial numbers, bit errors
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The chance that a line bit flips, on every link: 0 up to 0.5 [default: the profile's]
    #[arg(long, value_name = "RATE", value_parser = bit_error_rate)]
    ber: Option<f64>,
    /// The version of the ABI that the cards speak, as in 0.2: to rehearse with older and newer cards
    #[arg(long, value_name = "VERSION", hide = true, default_value_t = AbiVersion::OURS)]
    abi: AbiVersion,
    /// Stay, and take the twin down on Ctrl-C
    #[arg(long)]
    foreground: bool,
    /// Take down the twin that is up in the directory first
    #[arg(long)]
    replace: bool,
    /// Print one JSON object, as 'spanker twin status --json' does
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Command::Up(up) => start(up),
        Command::Status { json } => status(*json),
        Command::Down => down(),
        Command::Keeper { .. } => supervisor::daemon().map_err(said),
        Command::Card { dir, index } => supervisor::card(dir, *index).map_err(said),
        Command::Kill { card } => change(Request::Kill(*card)),
        Command::Stop { card } => change(Request::Stop(*card)),
        Command::Stick { card } => change(Request::Stick(*card)),
        Command::Garble { card } => change(Request::Garble(*card)),
        Command::Slow { card, factor } => change(Request::Slow(*card, *factor)),
        Command::Cut { link: (a, b) } => change(Request::Cut(*a, *b)),
        Command::Corrupt { link: (a, b), ber } => change(Request::Corrupt(*a, *b, *ber)),
        Command::Restore { what } => change(Request::Restore(*what)),
    }
}

fn change(request: Request) -> anyhow::Result<()> {
    control::ask(&home::find(), &request).map_err(said)?;
    show::changed(&request)
}

/// An error as the command shows it: advice on a line of its own.
fn said(error: TwinError) -> anyhow::Error {
    match (&error, error.hint()) {
        (TwinError::Unknown(_) | TwinError::Cluster(_), _) => Usage(error.to_string()).into(),
        (_, Some(hint)) => anyhow::anyhow!("{error}\nhint: {hint}"),
        (_, None) => error.into(),
    }
}

fn start(up: &Up) -> anyhow::Result<()> {
    let cluster = up.cluster.build()?;
    let pace = if up.unshaped { Pace::Unshaped } else { up.pace };
    if cluster.cards() > MOST_CARDS {
        let text = format!("--cards {}: a twin has at most {MOST_CARDS}", cluster.cards());
        return Err(Usage(text).into());
    }
    specs(&cluster, pace, up.seed).map_err(said)?;
    let spec = TwinSpec {
        dir: home::find(),
        title: cluster.describe(),
        cluster,
        pace,
        seed: up.seed,
        bit_error_rate: up.ber,
        abi: up.abi,
    };
    let signals = Signals::take().map_err(said)?;
    if up.replace {
        control::down(&spec.dir).map_err(said)?;
    }
    let begun = Instant::now();
    if up.foreground {
        return foreground(up, &spec, &signals, begun);
    }
    let program = Program::this(true).map_err(said)?;
    let status = supervisor::launch(&program, &spec, &signals, &mut |news| progress(&news, begun));
    output::progress_done();
    let status = status.map_err(said)?;
    match up.json {
        true => output::line(&serde_json::to_string(&status)?),
        false => show::up(&status, spec.cluster.notes(), begun.elapsed()),
    }
}

fn foreground(up: &Up, spec: &TwinSpec, signals: &Signals, begun: Instant) -> anyhow::Result<()> {
    let program = Program::this(false).map_err(said)?;
    let mut printed = Ok(());
    let left = supervisor::supervise(spec, program, signals, None, &mut |news| {
        progress(&news, begun);
        let News::Ready(status) = news else { return true };
        output::progress_done();
        printed = match up.json {
            true => {
                serde_json::to_string(&status).map_err(Into::into).and_then(|s| output::line(&s))
            }
            false => show::up(&status, spec.cluster.notes(), begun.elapsed())
                .and_then(|()| output::line("\nCtrl-C takes it down")),
        };
        // Without a reader nobody knows that the twin is up.
        printed.is_ok()
    });
    printed?;
    let left = left.map_err(said)?;
    match up.json {
        true => Ok(()),
        false => show::down(&spec.dir, &left),
    }
}

/// Says what is going on once it takes longer than anybody likes to wait in the dark.
fn progress(news: &News, begun: Instant) {
    if begun.elapsed() < Duration::from_secs(1) {
        return;
    }
    match news {
        News::Starting(cards) => output::progress(&format!("starting {cards} cards")),
        News::Linking(up, all) => output::progress(&format!("{up} of {all} links are up")),
        _ => {}
    }
}

fn status(json: bool) -> anyhow::Result<()> {
    match control::ask(&home::find(), &Request::Status).map_err(said)? {
        Answer::Status(status) if json => output::line(&serde_json::to_string(&status)?),
        Answer::Status(status) => show::status(&status),
        answer => anyhow::bail!("the supervisor answers {answer:?}"),
    }
}

fn down() -> anyhow::Result<()> {
    let dir = home::find();
    match control::down(&dir).map_err(said)? {
        Ending::Down(left) => show::down(&dir, &left),
        Ending::WasDown => output::line(&format!("no twin is up in {}", dir.display())),
        Ending::Swept => {
            let text = format!("no twin is up in {}: removed what was left of one", dir.display());
            output::line(&text)
        }
    }
}

fn pace(text: &str) -> Result<Pace, String> {
    match text {
        "card" => Ok(Pace::Card),
        "wall" => Ok(Pace::Wall),
        _ => Err("expected card or wall".into()),
    }
}

fn bit_error_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.0..0.5).contains(&rate) => Ok(rate),
        _ => Err("expected a number from 0 up to 0.5, as in 1e-6".into()),
    }
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (1.0..=1e6).contains(&factor) => Ok(factor),
        _ => Err("expected a number from 1 to 1000000".into()),
    }
}

fn link(text: &str) -> Result<(u32, u32), String> {
    let ends = text.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match ends {
        Some((a, b)) if a != b => Ok((a, b)),
        _ => Err("expected the numbers of two cards, as in 0-1".into()),
    }
}

fn target(text: &str) -> Result<Target, String> {
    match (u32::from_str(text), link(text)) {
        (Ok(card), _) => Ok(Target::Card(card)),
        (_, Ok((a, b))) => Ok(Target::Link(a, b)),
        _ => Err("expected the number of a card, or a link as in 0-1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_cards_or_links_and_nothing_else() {
        assert_eq!(target("3"), Ok(Target::Card(3)));
        assert_eq!(target("3-0"), Ok(Target::Link(3, 0)));
        for bad in ["", "-", "x", "1-", "-1", "1-1", "1-2-3", "99999999999", " 1"] {
            assert!(target(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_and_factors_that_mean_nothing_are_refused() {
        for bad in ["-1", "0.5", "1", "nan", "inf", "", "x"] {
            assert!(bit_error_rate(bad).is_err(), "{bad}");
        }
        for bad in ["0", "0.5", "-2", "nan", "inf", "1e7"] {
            assert!(factor(bad).is_err(), "{bad}");
        }
        assert_eq!((bit_error_rate("1e-6"), factor("4")), (Ok(1e-6), Ok(4.0)));
    }
}
