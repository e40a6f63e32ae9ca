// SPDX-License-Identifier: Apache-2.0
//! The maintainers' commands: those of the `justfile`, and those that a document lists in a table. It knows the
//! form that these two files have, not all of what `just` can do.

use std::collections::BTreeMap;

/// The recipes of a `justfile` that are not private, each with its command; parameters are left out.
pub fn recipes(justfile: &str) -> BTreeMap<String, String> {
    let mut recipes = BTreeMap::new();
    let mut lines = justfile.lines().peekable();
    let mut private = false;
    while let Some(line) = lines.next() {
        let is_head = line.starts_with(|first: char| first.is_ascii_lowercase());
        if let (true, Some((head, _))) = (is_head, line.rsplit_once(':')) {
            let name = head.split_whitespace().next().unwrap_or("");
            let command = lines.peek().map_or("", |line| line.trim());
            if !private {
                let command = command.trim_end_matches(" \"$@\"").trim_end_matches(" \"$1\"");
                recipes.insert(name.to_owned(), command.to_owned());
            }
        }
        private = line == "[private]";
    }
    recipes
}

/// The rows of a document's table that begin with `just NAME`, each with the command in its last column.
pub fn listed_commands(document: &str) -> BTreeMap<String, String> {
    let row = |line: &str| {
        let name = line.strip_prefix("| `just ")?.split('`').next()?;
        let last = line.trim_end_matches([' ', '|']).rsplit('|').next()?;
        Some((name.to_owned(), last.trim().trim_matches('`').to_owned()))
    };
    document.lines().filter_map(row).collect()
}
