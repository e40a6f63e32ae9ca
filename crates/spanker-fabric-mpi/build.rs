// SPDX-License-Identifier: Apache-2.0
//! Compiles the loops that are plain C, with the compiler of the MPI that everything else is built for.

fn main() {
    println!("cargo:rerun-if-changed=src/plain.c");
    println!("cargo:rerun-if-env-changed=MPICC");
    let mpicc = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into());
    cc::Build::new()
        .compiler(mpicc)
        .file("src/plain.c")
        .opt_level(3)
        .warnings(true)
        .compile("spanker_plain");
}
