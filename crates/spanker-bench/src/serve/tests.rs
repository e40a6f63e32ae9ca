// SPDX-License-Identifier: Apache-2.0
//! Servers that answer, refuse, fail and say nothing: what clients of them saw.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

use spanker_engine::Arrivals;

use super::*;

/// How long the server of a test takes for a token.
const STEP: Duration = Duration::from_millis(20);

/// Serves every connection on a thread of its own, as long as the test runs. `respond` writes the response to a request
/// of this number.
fn server(respond: impl Fn(usize, &str, &mut dyn Write) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let (respond, numbers) = (Arc::new(respond), Arc::new(AtomicUsize::new(0)));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let (respond, numbers) = (Arc::clone(&respond), Arc::clone(&numbers));
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().expect("a stream"));
                while let Some(body) = request(&mut reader) {
                    respond(numbers.fetch_add(1, Ordering::Relaxed), &body, &mut stream);
                }
            });
        }
    });
    address
}

/// The body of the next request.
fn request(reader: &mut impl BufRead) -> Option<String> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    String::from_utf8(body).ok()
}

fn chunk(out: &mut dyn Write, text: &str) {
    let _ = write!(out, "{:x}\r\n{text}\r\n", text.len());
    let _ = out.flush();
}

/// Streams as many tokens as were asked for, one in a step.
fn stream(body: &str, out: &mut dyn Write, is_whole: bool) {
    let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
    let tokens = body["max_tokens"].as_u64().expect("a number");
    let _ = write!(out, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
    for _ in 0..tokens {
        std::thread::sleep(STEP);
        chunk(out, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
    }
    if is_whole {
        let usage = format!(
            r#"{{"completion_tokens":{tokens},"prompt_tokens_details":{{"cached_tokens":3}}}}"#
        );
        chunk(out, &format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n"));
    }
    chunk(out, "");
}

fn target(address: SocketAddr) -> LoadTarget {
    let timeout = Duration::from_secs(20);
    LoadTarget { address, key: None, model: None, vocab: 5000, seed: 1, timeout }
}

fn load(clients: usize, requests: usize) -> ServiceLoad {
    let arrivals = Arrivals::Closed;
    ServiceLoad { clients, prompt: 6, shared: 2, answer: 5, requests, arrivals }
}

#[test]
fn what_clients_saw_is_what_the_server_did() {
    let address = server(|_, body, out| stream(body, out, true));
    let seen = load_server(&target(address), load(3, 2), |_| ()).expect("a load");
    assert_eq!((seen.answered, seen.refused, seen.failed.len()), (6, 0, 0), "{seen:?}");
    // Two answers one after the other, five tokens of three clients each. A busy machine is slower, none is faster.
    let most = 3.0 * 5.0 / (5.0 * STEP.as_secs_f64());
    assert!(seen.tokens_per_second <= most && seen.tokens_per_second > most / 10.0, "{seen:?}");
    assert!(seen.first[0] >= STEP.as_secs_f64(), "{seen:?}");
    assert!(seen.between[0] > 0.5 * STEP.as_secs_f64(), "{seen:?}");
    assert_eq!(seen.reused, Some(0.5));
}

#[test]
fn requests_by_the_clock_do_not_wait_for_others() {
    let address = server(|_, body, out| stream(body, out, true));
    let arrivals = Arrivals::Open { rate: 1000.0, seed: 5 };
    let begun = Instant::now();
    let load = ServiceLoad { arrivals, ..load(1, 20) };
    let seen = load_server(&target(address), load, |_| ()).expect("a load");
    assert_eq!(seen.answered, 20, "{seen:?}");
    // One after the other they would take two seconds.
    assert!(begun.elapsed() < Duration::from_millis(1500), "{:?}", begun.elapsed());
}

#[test]
fn refusals_and_failures_are_counted_and_told() {
    let address = server(|number, body, out| match number {
        0 => drop(write!(out, "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")),
        1 => drop(write!(out, "HTTP/1.1 400 Bad Request\r\ncontent-length: 6\r\n\r\nno way")),
        2 => stream(body, out, false),
        _ => stream(body, out, true),
    });
    let seen = load_server(&target(address), load(1, 4), |_| ()).expect("a load");
    assert_eq!((seen.answered, seen.refused), (1, 1), "{seen:?}");
    let [bad, cut] = &seen.failed[..] else { panic!("{seen:?}") };
    assert!(bad.contains("400") && bad.contains("no way"), "{bad}");
    assert!(cut.contains("before the answer did"), "{cut}");
}

#[test]
fn connection_that_the_server_closed_meanwhile_is_opened_again() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let opened = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&opened);
    std::thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::Relaxed);
            std::thread::spawn(move || {
                let mut reader = BufReader::new(connection.try_clone().expect("a stream"));
                if let Some(body) = request(&mut reader) {
                    stream(&body, &mut connection, true);
                }
                // It says nothing of closing, and ends when it is asked again.
                request(&mut reader);
            });
        }
    });
    let seen = load_server(&target(address), load(1, 3), |_| ()).expect("a load");
    assert_eq!((seen.answered, seen.failed.len()), (3, 0), "{seen:?}");
    assert_eq!(opened.load(Ordering::Relaxed), 3);
}

#[test]
fn answer_that_never_comes_is_not_waited_for() {
    let address = server(|_, _, _| std::thread::sleep(Duration::from_secs(60)));
    let target = LoadTarget { timeout: Duration::from_millis(100), ..target(address) };
    let seen = load_server(&target, load(2, 1), |_| ()).expect("a load");
    assert_eq!(seen.failed, ["no answer within 100ms"; 2]);
}

#[test]
fn other_machines_are_not_loaded() {
    let target = target("192.0.2.1:80".parse().expect("an address"));
    let error = load_server(&target, load(1, 1), |_| ()).expect_err("another machine");
    assert!(error.to_string().contains("only servers on this machine"), "{error}");
}

#[test]
fn prompts_begin_alike_and_differ_afterwards() {
    let target = target("127.0.0.1:80".parse().expect("an address"));
    let prompts: Vec<Vec<u32>> =
        (0..50).map(|number| prompt(&target, load(1, 50), number)).collect();
    assert!(prompts.iter().all(|prompt| prompt.len() == 6 && prompt[..2] == prompts[0][..2]));
    let tails: std::collections::HashSet<&[u32]> =
        prompts.iter().map(|prompt| &prompt[2..]).collect();
    assert_eq!(tails.len(), 50);
    assert!(prompts.iter().flatten().all(|&token| (625..5000).contains(&token)));
}

#[test]
fn prompts_of_seeds_that_look_alike_have_nothing_in_common() {
    let of = |row: u64| {
        let target = target("127.0.0.1:80".parse().expect("an address"));
        let target = LoadTarget { seed: target.seed.wrapping_add(row << 32), ..target };
        (0..64).map(move |number| prompt(&target, load(1, 64), number)[2..].to_vec())
    };
    let all: std::collections::HashSet<Vec<u32>> = (0..8).flat_map(of).collect();
    assert_eq!(all.len(), 8 * 64);
}
