// SPDX-License-Identifier: Apache-2.0
//! Licences, sources and duplicate versions of all dependencies against `deny.toml`, and each check against a fault
//! that it is for.

use std::path::{Path, PathBuf};
use std::process::Command;

use tidy::{Metadata, Rules, is_allowed};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

fn rules() -> Rules {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml");
    Rules::parse(&text).expect("rules")
}

/// What cargo says about a workspace with all its features. Its network is used only for what is not here yet.
fn metadata(manifest: &str, rules: &Rules) -> Metadata {
    let ask = |network: &[&str]| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root()).args(["metadata", "--format-version", "1", "--locked"]);
        cargo.args(["--all-features", "--manifest-path", manifest]).args(network);
        for target in rules.targets() {
            cargo.args(["--filter-platform", target]);
        }
        cargo.output().expect("cargo")
    };
    let mut output = ask(&["--offline"]);
    if !output.status.success() {
        output = ask(&[]);
    }
    assert!(
        output.status.success(),
        "cargo metadata for {manifest}: {}\nhint: `cargo metadata --manifest-path {manifest}` updates its Cargo.lock",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("metadata")
}

fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what} (see deny.toml):\n  {}", found.join("\n  "));
}

#[test]
fn dependencies_of_the_workspace_keep_the_rules_of_deny_toml() {
    let rules = rules();
    let metadata = metadata("Cargo.toml", &rules);
    // Backends that are built on request are checked as well.
    for expected in ["bindgen", "cudarc", "loom", "shuttle", "spanker-cli"] {
        let found = metadata.packages.iter().any(|package| package.name == expected);
        assert!(found, "{expected} is not among the dependencies");
    }
    assert_none("licences that are not allowed", &rules.licences(&metadata));
    assert_none("sources that are not allowed", &rules.sources(&metadata));
    assert_none("several versions of one crate", &rules.duplicates(&metadata));
    assert_none("skipped versions without a second one", &rules.needless_skips(&metadata));
}

#[test]
fn dependencies_of_the_fuzzers_keep_the_rules_of_deny_toml() {
    let rules = rules();
    let metadata = metadata("fuzz/Cargo.toml", &rules);
    assert_none("licences that are not allowed", &rules.licences(&metadata));
    assert_none("sources that are not allowed", &rules.sources(&metadata));
    assert_none("several versions of one crate", &rules.duplicates(&metadata));
}

/// Two good packages, and one that is to be found.
fn planted(package: &str) -> Metadata {
    let registry = "registry+https://github.com/rust-lang/crates.io-index";
    let text = format!(
        r#"{{"version": 1, "packages": [
            {{"name": "own", "version": "0.2.0", "license": "Apache-2.0", "source": null}},
            {{"name": "rand", "version": "0.9.5", "license": "MIT OR Apache-2.0", "source": "{registry}"}},
            {package}
        ]}}"#
    );
    serde_json::from_str(&text.replace("CRATES", registry)).expect("metadata")
}

#[test]
fn package_without_an_allowed_licence_is_named() {
    let found = rules().licences(&planted(
        r#"{"name": "planted", "version": "1.0.0", "license": "GPL-3.0-only", "source": "CRATES"}"#,
    ));
    assert_eq!(found, ["planted 1.0.0: GPL-3.0-only"]);
    let found = rules().licences(&planted(
        r#"{"name": "planted", "version": "1.0.0", "license": null, "source": "CRATES"}"#,
    ));
    assert_eq!(found, ["planted 1.0.0: states no licence"]);
    let found = rules().licences(&planted(
        r#"{"name": "planted", "version": "1.0.0", "license": "MIT OR", "source": "CRATES"}"#,
    ));
    assert_eq!(found, [r#"planted 1.0.0: "MIT OR": ends where a licence should be"#]);
}

#[test]
fn package_from_git_or_another_registry_is_named() {
    for source in ["git+https://example.org/planted?rev=1#1", "registry+https://example.org/index"]
    {
        let found = rules().sources(&planted(&format!(
            r#"{{"name": "planted", "version": "1.0.0", "license": "MIT", "source": "{source}"}}"#
        )));
        assert_eq!(found, [format!("planted 1.0.0: {source}")]);
    }
}

#[test]
fn second_version_of_a_crate_is_named_unless_it_is_skipped() {
    let rules = Rules::parse(
        r#"
        graph.targets = []
        licenses.allow = []
        bans.skip = [{ crate = "rand@0.8", reason = "planted" }]
        sources.allow-registry = []
        "#,
    );
    let rules = rules.expect("rules");
    let second = |version: &str| {
        planted(&format!(
            r#"{{"name": "rand", "version": "{version}", "license": "MIT", "source": "CRATES"}}"#
        ))
    };
    assert_eq!(rules.duplicates(&second("0.10.3")), ["rand: 0.9.5, 0.10.3"]);
    assert_eq!(rules.duplicates(&second("0.80.1")), ["rand: 0.9.5, 0.80.1"]);
    assert!(rules.duplicates(&second("0.8.5")).is_empty());
    assert!(rules.needless_skips(&second("0.8.5")).is_empty());
    assert_eq!(rules.needless_skips(&second("0.10.3")), ["rand@0.8"]);
}

#[test]
fn version_that_is_skipped_without_a_reason_is_refused() {
    let text = r#"
        graph.targets = []
        licenses.allow = []
        bans.skip = [{ crate = "rand@0.8", reason = "" }]
        sources.allow-registry = []
    "#;
    assert_eq!(Rules::parse(text).expect_err("no reason"), "rand@0.8: skipped without a reason");
}

#[test]
fn licence_expressions_are_read_as_spdx_defines_them() {
    let allow = ["MIT", "Apache-2.0", "Unicode-3.0"].map(str::to_owned);
    let allow_with = [allow.as_slice(), &["GPL-2.0 WITH Exception".to_owned()]].concat();
    for allowed in [
        "MIT",
        "MIT/Apache-2.0",
        "Apache-2.0 / MIT",
        "GPL-3.0-only OR MIT",
        "(MIT OR GPL-3.0-only) AND Unicode-3.0",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        // AND binds closer than OR.
        "MIT OR GPL-3.0-only AND GPL-2.0-only",
        "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
    ] {
        assert_eq!(is_allowed(allowed, &allow), Ok(true), "{allowed}");
    }
    for refused in [
        "GPL-3.0-only",
        "MIT AND GPL-3.0-only",
        "GPL-3.0-only/LGPL-2.1-only",
        "(MIT OR Apache-2.0) AND OpenSSL",
        "GPL-3.0-only AND (MIT OR Apache-2.0)",
        // An exception is part of the name: the licence without it does not stand for it.
        "Apache-2.0 WITH LLVM-exception",
        "mit",
    ] {
        assert_eq!(is_allowed(refused, &allow), Ok(false), "{refused}");
    }
    assert_eq!(is_allowed("GPL-2.0 WITH Exception", &allow_with), Ok(true));
    for malformed in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "AND MIT", "MIT WITH"] {
        assert!(is_allowed(malformed, &allow).is_err(), "{malformed}");
    }
}
