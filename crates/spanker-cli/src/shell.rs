// SPDX-License-Identifier: Apache-2.0
//! `spanker completions` and `spanker man`: the command's flags for shells and as manual pages, from the flags themselves.

use std::path::PathBuf;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, Usage, output};

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker completions bash > ~/.local/share/bash-completion/completions/spanker
  spanker completions fish > ~/.config/fish/completions/spanker.fish
  spanker completions zsh > ~/.zfunc/_spanker")]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Print the manual page, or save those of all commands
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker man | man -l -
  spanker man --out ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Save a page for every command in this folder instead
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "spanker", &mut text);
    output::text(&String::from_utf8(text)?)
}

pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let Some(folder) = &args.out else {
        let mut text = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut text)?;
        return output::text(&String::from_utf8(text)?);
    };
    let shown = folder.display();
    if folder.exists() && !folder.is_dir() {
        return Err(Usage(format!("--out {shown}: it is not a folder")).into());
    }
    let failed = || format!("cannot write to {shown}");
    std::fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(failed)?;
    output::note(format_args!("manual pages are in {shown}"));
    Ok(())
}
