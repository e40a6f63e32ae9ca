// SPDX-License-Identifier: Apache-2.0
//! Kernel sources into code for one kind of processor, by NVIDIA's compiler at run time. Not here: loading the code.

use std::ffi::{CStr, CString};
use std::path::Path;

use cudarc::nvrtc::{result, sys};

use crate::{CudaError, Part, kept, require};

/// Code that a driver can load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Image {
    /// Machine code for exactly the processor.
    Machine(Vec<u8>),
    /// Code that the driver translates, for processors that are newer than the compiler.
    Portable(String),
}

/// A program of the compiler, which is ended with this.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created by the library and is destroyed once. A refusal leaks it.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// The code of `source` for processors of this compute capability: from a folder where it is kept, or compiled, and kept
/// from then on.
///
/// # Errors
/// As [`image`].
pub(crate) fn kept_image(
    folder: Option<&Path>,
    name: &str,
    source: &str,
    options: &[String],
    capability: (u32, u32),
) -> Result<Image, CudaError> {
    let Some(folder) = folder else { return image(name, source, options, capability) };
    require(Part::Compiler)?;
    // All that code depends on; the driver loads it as it is, or translates it itself.
    let (compiler, kind) = (compiler_version()?, number(capability));
    let key = format!("NVRTC {compiler}, {kind}\n{}\n{name}\n{source}", options.join(" "));
    if let Some(image) = kept::read(folder, &key) {
        return Ok(image);
    }
    let image = image(name, source, options, capability)?;
    kept::write(folder, &key, &image);
    Ok(image)
}

/// The version of NVIDIA's compiler.
fn compiler_version() -> Result<String, CudaError> {
    let refused = |error| CudaError::call("ask NVRTC for its version", &error);
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library writes two numbers.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result().map_err(refused)?;
    Ok(format!("{major}.{minor}"))
}

/// Compiles `source` for processors of this compute capability.
///
/// # Errors
/// [`CudaError::Missing`] without the compiler, [`CudaError::Compile`] with its log.
pub(crate) fn image(
    name: &str,
    source: &str,
    options: &[String],
    capability: (u32, u32),
) -> Result<Image, CudaError> {
    require(Part::Compiler)?;
    let refused = |log: String| CudaError::Compile { name: name.to_owned(), log };
    let text = |text: &str| {
        CString::new(text).map_err(|_| refused("a zero byte in the source or the name".into()))
    };
    if options.iter().any(|option| option.contains('\0')) {
        return Err(refused("a zero byte in an option".into()));
    }
    let (source, file) = (text(source)?, text(&format!("{name}.cu"))?);
    let program = result::create_program(&source, Some(&file))
        .map_err(|error| refused(format!("{error:?}")))?;
    let program = Program(program);
    let machine = supported()?.contains(&number(capability));
    let mut all = vec![match machine {
        true => format!("--gpu-architecture=sm_{}", number(capability)),
        false => format!("--gpu-architecture=compute_{}", nearest(&supported()?, capability)),
    }];
    all.extend_from_slice(options);
    // SAFETY: the program is alive, and so are its source and its name.
    if let Err(error) = unsafe { result::compile_program(program.0, &all) } {
        return Err(refused(log(&program).unwrap_or_else(|| format!("{error:?}"))));
    }
    let code = |error| refused(format!("no code: {error:?}"));
    match machine {
        true => machine_code(&program).map(Image::Machine).map_err(code),
        false => portable_code(&program).map(Image::Portable).map_err(code),
    }
}

fn number((major, minor): (u32, u32)) -> u32 {
    major * 10 + minor
}

/// The newest kind that the compiler knows and that is not newer than the processor.
fn nearest(known: &[u32], capability: (u32, u32)) -> u32 {
    let older = known.iter().copied().filter(|&known| known <= number(capability));
    older.max().or(known.iter().copied().min()).unwrap_or(number(capability))
}

/// The kinds of processors that the compiler knows.
fn supported() -> Result<Vec<u32>, CudaError> {
    let refused = |error| CudaError::call("ask NVRTC for what it compiles", &error);
    let mut count = 0;
    // SAFETY: the library writes one number.
    unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result().map_err(refused)?;
    let mut known = vec![0i32; usize::try_from(count).unwrap_or(0)];
    if !known.is_empty() {
        // SAFETY: the buffer is long enough for as many numbers as the library has just said.
        unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result().map_err(refused)?;
    }
    Ok(known.into_iter().filter_map(|known| u32::try_from(known).ok()).collect())
}

fn log(program: &Program) -> Option<String> {
    // SAFETY: the program is alive.
    let log = unsafe { result::get_program_log(program.0) }.ok()?;
    let bytes: Vec<u8> = log.iter().map(|&byte| byte.cast_unsigned()).collect();
    let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn machine_code(program: &Program) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the program is alive, and the library writes one number.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }.result()?;
    let mut code = vec![0u8; size];
    // SAFETY: the buffer is long enough for as many bytes as the library has just said.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

fn portable_code(program: &Program) -> Result<String, result::NvrtcError> {
    // SAFETY: the program is alive.
    let code = unsafe { result::get_ptx(program.0) }?;
    let bytes: Vec<u8> = code.iter().map(|&byte| byte.cast_unsigned()).collect();
    Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
}

/// What tests of kernel sources ask: they compile where there is a compiler, and elsewhere the error says what to
/// install.
#[cfg(test)]
pub(crate) fn assert_compiles(name: &str, source: &str, options: &[String]) {
    match image(name, source, options, (9, 0)) {
        Ok(Image::Machine(code)) => assert!(code.starts_with(b"\x7fELF"), "{name}"),
        Ok(Image::Portable(code)) => assert!(code.contains(".target"), "{name}"),
        Err(CudaError::Missing { part: Part::Compiler, .. }) => {
            let said = require(Part::Compiler).unwrap_err().to_string();
            assert!(
                said.contains("nvidia-cuda-nvrtc") && said.contains("LD_LIBRARY_PATH"),
                "{said}"
            );
        }
        Err(error) => panic!("{name} {options:?}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_that_is_no_program_is_refused_with_the_compilers_words() {
        match image("broken", "extern \"C\" __global__ void f() { nonsense; }", &[], (9, 0)) {
            Err(CudaError::Compile { name, log }) => {
                assert_eq!(name, "broken");
                assert!(log.contains("nonsense") && log.contains("broken.cu"), "{log}");
            }
            other => assert!(matches!(other, Err(CudaError::Missing { .. })), "{other:?}"),
        }
    }

    #[test]
    fn zero_bytes_in_a_source_are_refused() {
        for (source, option) in [("\0", "-lineinfo"), ("", "-D\0")] {
            let refused = image("zero", source, &[option.to_owned()], (9, 0)).unwrap_err();
            let expected = matches!(refused, CudaError::Compile { .. } | CudaError::Missing { .. });
            assert!(expected, "{refused}");
        }
    }

    #[test]
    fn a_processor_newer_than_the_compiler_gets_code_of_the_nearest_kind() {
        let known = [75, 80, 86, 90];
        assert_eq!(nearest(&known, (12, 0)), 90);
        assert_eq!(nearest(&known, (8, 9)), 86);
        assert_eq!(nearest(&known, (7, 0)), 75);
    }

    #[test]
    fn a_small_kernel_compiles() {
        let source = "extern \"C\" __global__ void f(float *x) { x[threadIdx.x] = KIND; }";
        assert_compiles("small", source, &["-DKIND=1.0f".to_owned()]);
    }
}
