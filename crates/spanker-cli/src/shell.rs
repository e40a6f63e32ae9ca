// SPDX-License-Identifier: Apache-2.0
//! `spanker completions` and `spanker man`: the command's flags for shells and as manual pages, from the flags themselves.

use std::path::PathBuf;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, output, refuse};

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
        return refuse(format!("--out {shown}: it is not a folder"));
    }
    let failed = || format!("cannot write to {shown}");
    std::fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(failed)?;
    output::note(format_args!("manual pages are in {shown}"));
    Ok(())
}

/// A word as a shell takes it.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:@%=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_split_or_expand_them() {
        for plain in ["/tmp/spanker-0", "run", "-p", "a=b,c:2@1.5"] {
            assert_eq!(quoted(plain), plain);
        }
        assert_eq!([quoted("/a b/$c"), quoted("")], ["'/a b/$c'", "''"]);
        assert_eq!(quoted("it's here"), r"'it'\''s here'");
    }
}
