// SPDX-License-Identifier: Apache-2.0
//! The vectors and the credit table of `docs/link-protocol.md` are what the code computes.

use spanker_link::{Decoded, crc8, decode, encode};

const DOCUMENT: &str = include_str!("../../../../docs/link-protocol.md");

fn bytes(hex: &str) -> Vec<u8> {
    let digits = if hex == "-" { "" } else { hex };
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal"))
        .collect()
}

fn number(hex: &str) -> u64 {
    u64::from_str_radix(hex, 16).expect("hexadecimal")
}

#[test]
fn vectors_of_the_document_are_what_the_code_computes() {
    let block = DOCUMENT.split("```vectors\n").nth(1).expect("vectors");
    let lines: Vec<&str> = block.split("```").next().expect("an end").lines().collect();
    let mut checked = [0; 3];
    for line in lines {
        let (left, right) = line.split_once(" -> ").expect("an arrow");
        let words: Vec<&str> = left.split(' ').collect();
        match words[..] {
            ["crc8", input] => {
                checked[0] += 1;
                assert_eq!(u64::from(crc8(&bytes(input))), number(right), "{line}");
            }
            ["crc32c", input] => {
                checked[1] += 1;
                let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes(input));
                assert_eq!(crc, number(right), "{line}");
            }
            ["frame", code, session, seq, ack, credit, payload] => {
                checked[2] += 1;
                check_frame(line, [code, session, seq, ack, credit].map(number), payload, right);
            }
            _ => panic!("what is {line}"),
        }
    }
    assert_eq!(checked, [2, 1, 7]);
}

/// The bytes decode to the fields, and the fields encode to the bytes.
fn check_frame(line: &str, fields: [u64; 5], payload: &str, wire: &str) {
    let (payload, wire) = (bytes(payload), bytes(wire));
    let Decoded::Frame { header, payload: found, used } = decode(&wire) else {
        panic!("{line} does not decode");
    };
    assert_eq!((found, used), (&payload[..], wire.len()), "{line}");
    let [code, session, seq, ack, credit] = fields;
    let first = u64::from(u16::from_le_bytes([wire[4], wire[5]]));
    assert_eq!(first, code | (payload.len() as u64) << 3, "{line}");
    let numbers = [header.session, header.seq, header.ack].map(u64::from);
    assert_eq!(numbers, [session, seq, ack], "{line}");
    assert_eq!(u64::from(header.credit), credit, "{line}");
    let mut again = Vec::new();
    encode(&header, &[&payload], &mut again);
    assert_eq!(again, wire, "{line}");
}

#[test]
fn credit_table_of_the_document_follows_its_rule() {
    let table = DOCUMENT.split("| base | sent up to |").nth(1).expect("the table");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let base: u16 = row[0].parse().expect("a number");
        let sent = row[1].parse::<u16>().map_or(0, |last| last.wrapping_sub(base) + 1);
        let ack: u16 = row[2].parse().expect("a number");
        let credit = number(row[3].trim_start_matches("0x")) as u8;
        let frames = ack.wrapping_sub(base);
        if frames > sent {
            assert_eq!(row[4], format!("old: {frames} > {sent}"));
            continue;
        }
        let free = u16::from(credit.wrapping_sub(ack as u8));
        let limit = ack.wrapping_add(free);
        let expected = [frames, free, limit, limit.wrapping_sub(5)].map(|value| value.to_string());
        assert_eq!(row[4..8], expected, "{row:?}");
    }
}
