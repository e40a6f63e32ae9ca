// SPDX-License-Identifier: Apache-2.0
//! Weights that end where memory ends: a kernel that reads one byte more ends the process. A page that lies
//! beyond the end of a mapped file is such an end.
#![allow(unsafe_code)]

use std::io::Write;

use ggml_spanker::{Inputs, Path, Quant, WEIGHT_TYPES, decode, multiply_on, quantize};
use memmap2::MmapOptions;

/// More than any page.
const PAGE: usize = 1 << 16;

/// Calls `work` with `bytes` at the end of memory that can be read.
fn at_the_end(bytes: &[u8], work: impl FnOnce(&[u8])) {
    let whole = bytes.len().next_multiple_of(PAGE);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![0; whole - bytes.len()]).unwrap();
    file.write_all(bytes).unwrap();
    // SAFETY: nobody else has the file, and what is passed on lies within it.
    let map = unsafe { MmapOptions::new().len(whole + PAGE).map(&file) }.unwrap();
    work(&map[whole - bytes.len()..whole]);
}

fn weights(quant: Quant, rows: usize, width: usize) -> Vec<u8> {
    let bytes = rows * quant.row_bytes(width as u64) as usize;
    (0..bytes as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 26) as u8).collect()
}

#[test]
fn products_of_weights_at_the_end_of_memory_are_those_of_the_same_weights_elsewhere() {
    for quant in WEIGHT_TYPES {
        let input = quant.input();
        for (rows, width) in [(1, 256), (3, 512)] {
            let values: Vec<f32> = (0..rows * width).map(|at| (at as f32).sin()).collect();
            let mut blocks = vec![0; rows * input.row_bytes(width as u64) as usize];
            quantize(input, &values, &mut blocks).unwrap();
            let mut inputs = Inputs::new();
            at_the_end(&blocks, |blocks| inputs.load(input, blocks, rows, width).unwrap());
            for n in [1, 3, 4, 8, 15, 16, 17, 40, 300] {
                let weights = weights(quant, n, width);
                let mut expected = vec![0.0; rows * n];
                multiply_on(Path::Portable, quant, &weights, n, &inputs, &mut expected).unwrap();
                at_the_end(&weights, |weights| {
                    for path in Path::available() {
                        let mut out = vec![0.0; rows * n];
                        multiply_on(path, quant, weights, n, &inputs, &mut out).unwrap();
                        let same =
                            out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{quant} x {n} rows on {path}");
                    }
                });
            }
        }
    }
}

#[test]
fn weights_at_the_end_of_memory_are_decoded() {
    for quant in WEIGHT_TYPES {
        let weights = weights(quant, 1, 256);
        let (mut expected, mut out) = ([0.0; 256], [1.0; 256]);
        decode(quant, &weights, &mut expected).unwrap();
        at_the_end(&weights, |weights| decode(quant, weights, &mut out).unwrap());
        assert_eq!(expected.map(f32::to_bits), out.map(f32::to_bits), "{quant}");
    }
}

/// Says to a test that it is the process which reads beyond the end.
#[cfg(unix)]
const BEYOND: &str = "GGML_SPANKER_BEYOND";

#[cfg(unix)]
#[test]
fn pages_that_no_model_file_lacks_still_end_the_process_by_the_signal() {
    use std::os::unix::process::ExitStatusExt;
    if let Ok(path) = std::env::var(BEYOND) {
        let _model = ggml_spanker::GgufFile::open(path).unwrap();
        let file = tempfile::tempfile().unwrap();
        // SAFETY: nobody else has the file; that its page is not there is what this is about.
        let map = unsafe { MmapOptions::new().len(PAGE).map(&file) }.unwrap();
        panic!("a page that is not there begins with {}", map[0]);
    }
    let mut model = tempfile::NamedTempFile::new().unwrap();
    model.write_all(b"GGUF\x03\0\0\0").unwrap();
    model.write_all(&[0; 16]).unwrap();
    let name = "pages_that_no_model_file_lacks_still_end_the_process_by_the_signal";
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(BEYOND, model.path());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{:?}: {said}", output.status);
    assert!(!said.contains("cut short"), "{said}");
}
