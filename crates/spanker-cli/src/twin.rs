// SPDX-License-Identifier: Apache-2.0
//! `spanker twin`: emulated cards to rehearse with. Processes, links and directories are the library's.

mod show;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use spanker_runtime::AbiVersion;
use spanker_twin::control::{self, Answer, Ending, Request, Target};
use spanker_twin::supervisor::{self, News, Program, TwinSpec};
use spanker_twin::{MOST_CARDS, Pace, Signals, TwinError, home, specs, text};

use crate::cluster::ClusterArgs;
use crate::llm::one_of;
use crate::{output, refuse, usage};

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
        #[arg(value_name = "A-B", value_parser = text::link)]
        link: (u32, u32),
    },
    /// Flip bits on the link between two cards
    Corrupt {
        /// The two cards, as in 0-1
        #[arg(value_name = "A-B", value_parser = text::link)]
        link: (u32, u32),
        /// The chance that a line bit flips: 0 up to 0.5
        #[arg(long, value_name = "RATE", value_parser = text::bit_error_rate)]
        ber: f64,
    },
    /// Let a card take several times as long for everything
    Slow {
        /// The card's number
        card: u32,
        /// How many times as long: 1 to 1000000
        #[arg(long, value_name = "TIMES", value_parser = text::factor)]
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
        #[arg(value_name = "N|A-B", value_parser = Target::from_str)]
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
    #[arg(long, default_value = "card", value_parser = one_of(&[Pace::Card, Pace::Wall], Pace::name))]
    pace: Pace,
    /// Work as fast as possible, with no profile's speed: card time is wall time
    #[arg(long, conflicts_with = "pace")]
    unshaped: bool,
    /// Where randomness begins: serial numbers, bit errors
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The chance that a line bit flips, on every link: 0 up to 0.5 [default: the profile's]
    #[arg(long, value_name = "RATE", value_parser = text::bit_error_rate)]
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
    say!("{request}")
}

/// An error as the command shows it: advice on a line of its own.
fn said(error: TwinError) -> anyhow::Error {
    match (&error, error.hint()) {
        (TwinError::Unknown(_) | TwinError::Cluster(_), _) => usage(error.to_string()),
        (_, Some(hint)) => anyhow::anyhow!("{error}\nhint: {hint}"),
        (_, None) => error.into(),
    }
}

fn start(up: &Up) -> anyhow::Result<()> {
    let cluster = up.cluster.build()?;
    let pace = if up.unshaped { Pace::Unshaped } else { up.pace };
    if cluster.cards() > MOST_CARDS {
        let text = format!("--cards {}: a twin has at most {MOST_CARDS}", cluster.cards());
        return refuse(text);
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
    output::report(up.json, &status, |status| {
        show::up(status, spec.cluster.notes(), begun.elapsed())
    })
}

fn foreground(up: &Up, spec: &TwinSpec, signals: &Signals, begun: Instant) -> anyhow::Result<()> {
    let program = Program::this(false).map_err(said)?;
    let mut printed = Ok(());
    let left = supervisor::supervise(spec, program, signals, None, &mut |news| {
        progress(&news, begun);
        let News::Ready(status) = news else { return true };
        output::progress_done();
        printed = output::report(up.json, &status, |status| {
            show::up(status, spec.cluster.notes(), begun.elapsed())?;
            output::line("\nCtrl-C takes it down")
        });
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
        Answer::Status(status) => output::report(json, &*status, show::status),
        answer => anyhow::bail!("the supervisor answers {answer:?}"),
    }
}

fn down() -> anyhow::Result<()> {
    let dir = home::find();
    match control::down(&dir).map_err(said)? {
        Ending::Down(left) => show::down(&dir, &left),
        Ending::WasDown => say!("no twin is up in {}", dir.display()),
        Ending::Swept => {
            let text = format!("no twin is up in {}: removed what was left of one", dir.display());
            output::line(&text)
        }
    }
}
