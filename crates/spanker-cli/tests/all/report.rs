// SPDX-License-Identifier: Apache-2.0
//! `spanker report` and `--report` as a user runs them: pages with the numbers of the commands, and files that are none.
//! What pages look like is seen in a browser (`scripts/check-page`).

use serde_json::Value;
use spanker_plan::{Origin, Trace};

use crate::scratch::{Scratch, number};

const PLAN: &str = "plan tinyllama-1.1b --profile rev-a --cards 3 --topology ring";

/// The data of a page, which is one element of it.
fn data(page: &str) -> Value {
    let (_, rest) =
        page.split_once("<script type=\"application/json\" id=\"data\">").expect("data");
    let (text, _) = rest.split_once("</script>").expect("an end");
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn page_of_a_plan_has_its_numbers_and_is_one_file() {
    let scratch = Scratch::new(&[]);
    let said = scratch.text(&format!("{PLAN} --report page.html --out plan.json"));
    assert!(said.contains("saved page.html: open it in a browser"), "{said}");
    let page = scratch.read("page.html");
    assert!(page.starts_with("<!doctype html>") && page.len() < 1_000_000, "{}", page.len());
    let data = data(&page);
    let best = &scratch.json(PLAN)["candidates"][0];
    assert_eq!(&data["own"], best);
    let made = format!("spanker {PLAN} --report page.html --out plan.json");
    assert_eq!(data["source"]["commands"][0], made);
    // The plan as it is comes first among the what-ifs.
    let planned = &data["scenarios"]["planned"];
    assert_eq!(planned[0][2], best["tokens_per_second"]);
    assert!(planned.as_array().is_some_and(|planned| planned.len() > 20), "{planned}");
    // A saved plan gives the same page but for the command.
    let again = scratch.text("report plan.json --out again.html --no-what-if");
    assert!(again.is_empty(), "{again}");
    let again = self::data(&scratch.read("again.html"));
    assert_eq!((&again["own"], &again["timeline"]), (&data["own"], &data["timeline"]));
    assert!(again["scenarios"].is_null());
}

#[test]
fn page_of_two_traces_has_their_comparison() {
    let scratch = Scratch::new(&[]);
    scratch.text(&format!("{PLAN} --out plan.json"));
    scratch.text("simulate plan.json --tokens 3 --trace one.json");
    scratch.text("simulate plan.json --tokens 3 --slow card1*1.5 --trace slow.json");
    let slow =
        Trace::from_perfetto(&scratch.read("slow.json"), Origin::Predicted).expect("a trace");
    scratch.put("measured.json", slow.to_perfetto(Origin::Measured).as_bytes());
    scratch.text("report plan.json one.json measured.json --no-what-if");
    let data = data(&scratch.read("report.html"));
    let whole = &data["comparison"]["whole"];
    assert!(number(whole, "gap_ms") > 0.0, "{whole}");
    assert_eq!(whole, &scratch.json("compare one.json measured.json")["whole"]);
}

#[test]
fn files_that_are_no_plans_or_traces_are_named_and_nothing_is_written() {
    let scratch = Scratch::new(&[("bad.json", "{}"), ("x", "")]);
    scratch.text(&format!("{PLAN} --out plan.json"));
    assert!(scratch.error(1, "report bad.json").contains("bad.json"));
    assert!(scratch.error(1, "report plan.json bad.json").contains("bad.json"));
    assert!(scratch.error(2, "report plan.json --out x/page.html").contains("x/page.html"));
    assert!(
        scratch.error(2, &format!("{PLAN} --report none/page.html")).contains("none/page.html")
    );
    scratch.text("simulate plan.json --trace one.json");
    let twice = scratch.error(1, "report plan.json one.json one.json");
    assert!(twice.contains("one.json: a second trace"), "{twice}");
    assert!(!scratch.names().iter().any(|name| name.ends_with(".html")), "{:?}", scratch.names());
}

#[test]
fn names_from_files_end_no_element_of_the_page() {
    let scratch = Scratch::new(&[]);
    scratch.text(&format!("{PLAN} --out plan.json"));
    let hostile = "</script><img src=x onerror=alert(1)>";
    let plan = scratch.read("plan.json").replace("tinyllama-1.1b", hostile);
    scratch.put("plan.json", plan.as_bytes());
    scratch.text("report plan.json --no-what-if");
    let page = scratch.read("report.html");
    assert!(!page.contains("<img"), "markup from a name");
    assert!(data(&page)["title"].as_str().is_some_and(|title| title.starts_with(hostile)));
}
