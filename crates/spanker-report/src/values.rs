// SPDX-License-Identifier: Apache-2.0
//! The numbers of a profile as rows: where in the profile, the value and its range, where it comes from and how far to trust
//! it.

use serde_json::{Value, json};
use spanker_topology::{Cluster, Profile};

/// Every kind of card of a cluster, with the cards that are of it and the rows of its profile.
pub(crate) fn kinds(cluster: &Cluster) -> Value {
    let mut kinds: Vec<(&Profile, Vec<usize>)> = Vec::new();
    for card in 0..cluster.cards() {
        let profile = cluster.profile(card);
        match kinds.iter_mut().find(|(known, _)| *known == profile) {
            Some((_, cards)) => cards.push(card),
            None => kinds.push((profile, vec![card])),
        }
    }
    let kind = |(profile, cards): (&Profile, Vec<usize>)| json!({ "name": profile.name, "summary": profile.summary, "cards": cards, "values": rows(profile) });
    kinds.into_iter().map(kind).collect()
}

/// The values of a profile. Rates of operators, of which a measured profile has dozens, are counted only.
fn rows(profile: &Profile) -> Vec<Value> {
    let mut rows = Vec::new();
    let whole = serde_json::to_value(profile).unwrap_or_default();
    walk("", &whole, &mut rows);
    let operators = profile.compute.operators.len();
    if operators > 0 {
        rows.push(json!({
            "name": "compute.operators", "value": operators, "provenance": "measured",
            "source": "kinds of operators with a rate of their own: spanker profiles, or spanker probe --save",
        }));
    }
    rows
}

fn walk(path: &str, value: &Value, rows: &mut Vec<Value>) {
    let Value::Object(fields) = value else { return };
    if fields.contains_key("provenance") && fields.contains_key("value") {
        let mut row = fields.clone();
        row.insert("name".into(), path.into());
        rows.push(Value::Object(row));
        return;
    }
    for (name, inner) in fields {
        let place = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        walk(&place, inner, rows);
    }
}

#[cfg(test)]
mod tests {
    use spanker_topology::{Profile, Shape};

    use super::*;

    #[test]
    fn every_value_of_a_profile_is_a_row_with_its_source() {
        let profile = Profile::builtin("rev-a").expect("built in");
        let rows = rows(&profile);
        let named = |name: &str| rows.iter().find(|row| row["name"] == name).expect("a row");
        let bandwidth = named("memory.bandwidth");
        assert_eq!(bandwidth["value"], profile.memory.bandwidth.value.0);
        assert_eq!(bandwidth["source"], profile.memory.bandwidth.source);
        assert!(named("link.latency")["low"].is_number());
        assert!(rows.iter().all(|row| row["source"].is_string()), "a row without a source");
    }

    #[test]
    fn cards_of_one_kind_share_their_rows() {
        let profile = Profile::builtin("rev-a").expect("built in");
        let mut other = profile.clone();
        other.memory.bandwidth.value.0 /= 2;
        let cards = vec![profile.clone(), other, profile];
        let kinds = kinds(&Cluster::new(cards, Shape::Ring).expect("a ring"));
        assert_eq!(kinds.as_array().map(Vec::len), Some(2));
        assert_eq!(kinds[0]["cards"], json!([0, 2]));
    }
}
