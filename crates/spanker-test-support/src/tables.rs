// SPDX-License-Identifier: Apache-2.0
//! Tables in documents: compared with what the code computes, or written by it with UPDATE_DOCS=1.
//!
//! A table stands between `<!-- table: name -->` and `<!-- end -->`, each on a line of its own.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const OPEN: &str = "<!-- table: ";
const CLOSE: &str = "<!-- end -->";

/// A Markdown table, each line ended.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: &[&str]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(header);
    text += &line(&vec!["---"; header.len()]).replace(' ', "");
    for row in rows {
        assert_eq!(row.len(), header.len(), "{row:?} is not a row of {header:?}");
        text += &line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

/// The document with the tables' text in place of what stands between their markers.
fn filled(text: &str, tables: &[(&str, String)]) -> String {
    let mut parts = text.split(OPEN);
    let mut result = parts.next().unwrap_or("").to_owned();
    let mut seen = BTreeSet::new();
    for part in parts {
        let (name, rest) = part.split_once(" -->\n").expect("a marker ends its line");
        let (_, after) = rest.split_once(CLOSE).unwrap_or_else(|| panic!("{name} has no end"));
        let found = tables.iter().find(|(known, _)| *known == name);
        let (_, table) = found.unwrap_or_else(|| panic!("nothing computes the table {name}"));
        assert!(seen.insert(name), "the table {name} is there twice");
        result += &format!("{OPEN}{name} -->\n{table}{CLOSE}{after}");
    }
    let computed: BTreeSet<&str> = tables.iter().map(|(name, _)| *name).collect();
    assert_eq!(seen, computed, "tables in the document, and tables that are computed");
    result
}

/// Checks that a document of the folder `docs` has exactly these tables, or writes them.
pub fn check(document: &str, tables: &[(&str, String)]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(document);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let wanted = filled(&text, tables);
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        fs::write(&path, wanted).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        return;
    }
    for (have, want) in text.lines().zip(wanted.lines()) {
        assert_eq!(have, want, "{document} is out of date; UPDATE_DOCS=1 writes its tables");
    }
    assert_eq!(text, wanted, "{document} is out of date; UPDATE_DOCS=1 writes its tables");
}
