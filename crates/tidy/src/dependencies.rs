// SPDX-License-Identifier: Apache-2.0
//! What `deny.toml` says about dependencies, against what `cargo metadata` says they are: licences, sources and
//! duplicate versions. Reads text that it is given; advisories are not its business.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::spdx::is_allowed;

/// The parts of `cargo metadata` that the rules are about.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// Every package of the graph, those of the workspace included.
    pub packages: Vec<Package>,
}

/// One package of the graph.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its exact version.
    pub version: String,
    /// Its licence expression.
    pub license: Option<String>,
    /// Where it comes from; nothing for a path.
    pub source: Option<String>,
}

impl Package {
    fn named(&self) -> String {
        format!("{} {}", self.name, self.version)
    }
}

/// The parts of `deny.toml` that are checked here.
#[derive(Debug, Deserialize)]
pub struct Rules {
    graph: Graph,
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    skip: Vec<Skip>,
}

#[derive(Debug, Deserialize)]
struct Skip {
    #[serde(rename = "crate")]
    spec: String,
    reason: String,
}

impl Skip {
    /// `rand@0.8` stands for every version of `rand` that begins with `0.8.`.
    fn matches(&self, package: &Package) -> bool {
        let Some((name, version)) = self.spec.split_once('@') else { return false };
        let rest = package.version.strip_prefix(version);
        name == package.name && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

impl Rules {
    /// The rules in the text of a `deny.toml`.
    pub fn parse(text: &str) -> Result<Rules, String> {
        let rules: Rules = toml::from_str(text).map_err(|error| error.to_string())?;
        match rules.bans.skip.iter().find(|skip| skip.reason.is_empty()) {
            Some(skip) => Err(format!("{}: skipped without a reason", skip.spec)),
            None => Ok(rules),
        }
    }

    /// The targets whose dependencies are checked.
    pub fn targets(&self) -> &[String] {
        &self.graph.targets
    }

    /// Packages without a licence that is allowed.
    pub fn licences(&self, metadata: &Metadata) -> Vec<String> {
        let problem = |package: &Package| {
            let Some(expression) = &package.license else {
                return Some(format!("{}: states no licence", package.named()));
            };
            match is_allowed(expression, &self.licenses.allow) {
                Ok(true) => None,
                Ok(false) => Some(format!("{}: {expression}", package.named())),
                Err(error) => Some(format!("{}: {error}", package.named())),
            }
        };
        metadata.packages.iter().filter_map(problem).collect()
    }

    /// Packages that come neither from an allowed registry nor from a path.
    pub fn sources(&self, metadata: &Metadata) -> Vec<String> {
        let is_known = |source: &str| {
            let registry = source.strip_prefix("registry+");
            registry.is_some_and(|url| self.sources.allow_registry.iter().any(|known| known == url))
        };
        let problem = |package: &Package| {
            let source = package.source.as_deref().filter(|source| !is_known(source))?;
            Some(format!("{}: {source}", package.named()))
        };
        metadata.packages.iter().filter_map(problem).collect()
    }

    /// Crates of which more than one version is not skipped.
    pub fn duplicates(&self, metadata: &Metadata) -> Vec<String> {
        let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for package in &metadata.packages {
            if !self.bans.skip.iter().any(|skip| skip.matches(package)) {
                versions.entry(&package.name).or_default().push(&package.version);
            }
        }
        let several = versions.into_iter().filter(|(_, versions)| versions.len() > 1);
        several.map(|(name, versions)| format!("{name}: {}", versions.join(", "))).collect()
    }

    /// Skipped versions that are not a second version of anything.
    pub fn needless_skips(&self, metadata: &Metadata) -> Vec<String> {
        let is_needed = |skip: &Skip| {
            let mut skipped = metadata.packages.iter().filter(|package| skip.matches(package));
            skipped.any(|package| {
                let is_other = |other: &&Package| {
                    other.name == package.name && other.version != package.version
                };
                metadata.packages.iter().find(is_other).is_some()
            })
        };
        let needless = self.bans.skip.iter().filter(|skip| !is_needed(skip));
        needless.map(|skip| skip.spec.clone()).collect()
    }
}
