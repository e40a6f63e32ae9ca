// SPDX-License-Identifier: Apache-2.0
//! The page's files: all of them are there, and nothing of them comes from anywhere else.

use crate::place::Place;
use crate::script::says;

#[test]
fn page_is_complete_and_may_do_nothing_but_ask_this_server() {
    let place = Place::scripted(says("hello"));
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/style.css", "text/css; charset=utf-8"),
        ("/chat.js", "text/javascript; charset=utf-8"),
        ("/cards.js", "text/javascript; charset=utf-8"),
        ("/icon.svg", "image/svg+xml"),
    ] {
        let response = place.get(path);
        assert_eq!((response.status, response.header("content-type")), (200, Some(kind)), "{path}");
        let policy = response.header("content-security-policy").expect("a policy");
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"));
        let text = response.text();
        assert!(text.len() > 100, "{path}");
        // Names of vocabularies are no addresses that something is loaded from.
        let rest = text.replace("http://www.w3.org/2000/svg", "");
        for outside in [
            "http:",
            "https:",
            "//cdn",
            "@import",
            "eval(",
            "innerHTML",
            "outerHTML",
            "document.write",
            "insertAdjacentHTML",
            " style=",
            "onclick=",
        ] {
            assert!(!rest.contains(outside), "{path}: {outside}");
        }
    }
    let page = place.get("/");
    for (before, after) in [("src=\"", "\""), ("href=\"", "\"")] {
        for part in page.text().split(before).skip(1) {
            let target = part.split(after).next().expect("a target");
            if !target.starts_with('#') {
                assert_eq!(place.get(&format!("/{target}")).status, 200, "{target}");
            }
        }
    }
}
