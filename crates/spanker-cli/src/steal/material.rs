// SPDX-License-Identifier: Apache-2.0
//! What the items of a job are, from flags: nothing, numbers to hash, rows of a product, prompts. Nobody works on them
//! here.

use std::path::PathBuf;
use std::sync::Arc;

use ggml_spanker::{Q4_K_BLOCK_BYTES, QK_K};
use spanker_jobs::Product;
use spanker_steal::{Job, Options};

use super::crew::Kind;
use super::questions::Questions;
use super::work::BYTES;
use super::{Args, JobKind};
use crate::{Usage, bench};

/// Values that both operands of a product share, and rows of the right one, where nobody says.
const SIDE: usize = 1024;
/// Tokens of an answer where nobody says.
const TOKENS: usize = 16;

/// Flags for one job each.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub(super) struct Flags {
    /// Values of a row, for matmul: a multiple of 256 [default: 1024]
    #[arg(long, value_name = "K")]
    k: Option<usize>,
    /// Rows of the right operand, and so values of an output, for matmul [default: 1024]
    #[arg(long, value_name = "N")]
    n: Option<usize>,
    /// The model, for prompts: a .gguf file, or the name of a fetched model
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// A file with a prompt on every line, for prompts [default: a dozen short ones]
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Tokens of an answer at most, for prompts [default: 16]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Answer all prompts once more beforehand, in one process, and compare every token
    #[arg(long)]
    check: bool,
}

impl Flags {
    /// Refuses flags of other jobs.
    fn check(&self, kind: JobKind) -> Result<(), Usage> {
        let flags = [
            ("--k", self.k.is_some(), JobKind::Matmul),
            ("--n", self.n.is_some(), JobKind::Matmul),
            ("--model", self.model.is_some(), JobKind::Prompts),
            ("--prompts", self.prompts.is_some(), JobKind::Prompts),
            ("--tokens", self.tokens.is_some(), JobKind::Prompts),
            ("--check", self.check, JobKind::Prompts),
        ];
        match flags.into_iter().find(|(_, given, of)| *given && *of != kind) {
            Some((flag, _, of)) => Err(Usage(format!("{flag} is for --job {}", of.name()))),
            None => Ok(()),
        }
    }
}

/// What the items of a job are.
pub(super) enum Material {
    /// Nothing: they take time.
    Sleep,
    /// Their numbers.
    Hash,
    /// Rows of the left operand.
    Matmul(Arc<Product>),
    /// Prompts, and whether their answers are compared.
    Prompts(Box<Questions>, bool),
}

impl Material {
    /// What flags ask for, and the job with these options, if there is room for it.
    pub(super) fn of(args: &Args, options: Options) -> anyhow::Result<(Material, Job)> {
        let (kind, flags) = (args.job, &args.real);
        flags.check(kind)?;
        suits(args)?;
        let items = args.items.unwrap_or(kind.items());
        let plain = || Job::new(items, BYTES).options(options.clone());
        match kind {
            JobKind::Sleep => Ok((Material::Sleep, room(args, plain(), 0)?)),
            JobKind::Hash => Ok((Material::Hash, room(args, plain(), 0)?)),
            JobKind::Matmul => {
                let (k, n) = (flags.k.unwrap_or(SIDE), flags.n.unwrap_or(SIDE));
                let product = Arc::new(product(args, items, k, n)?);
                let job = product.job().options(options);
                Ok((Material::Matmul(product), job))
            }
            JobKind::Prompts => {
                if args.items.is_some() {
                    let text = "--items is for other jobs: with --job prompts an item is a prompt";
                    return Err(Usage(text.into()).into());
                }
                let Some(model) = &flags.model else {
                    return Err(Usage("--job prompts needs a model: -m MODEL".into()).into());
                };
                let tokens = flags.tokens.unwrap_or(TOKENS);
                if tokens == 0 {
                    return Err(Usage("--tokens 0: an answer has at least one token".into()).into());
                }
                let questions = Questions::open(model, flags.prompts.as_deref(), tokens)?;
                let job = questions.prompts.job().options(options);
                Ok((Material::Prompts(Box::new(questions), flags.check), job))
            }
        }
    }

    /// Bytes of one output.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Material::Sleep | Material::Hash => BYTES,
            Material::Matmul(product) => 4 * product.dims()[2],
            Material::Prompts(questions, _) => 4 * questions.tokens,
        }
    }
}

/// Refuses backends and flags that a job has no use for.
fn suits(args: &Args) -> Result<(), Usage> {
    let job = args.job.name();
    let real = matches!(args.job, JobKind::Matmul | JobKind::Prompts);
    for kind in &args.backends.0 {
        match kind {
            Kind::Card { index } if !real => {
                return Err(Usage(format!(
                    "card:{index}: --job {job} runs on cpu and emul backends only"
                )));
            }
            Kind::Card { index } if args.simulate => {
                return Err(Usage(format!(
                    "card:{index}: a card has no virtual time, use emul with --simulate"
                )));
            }
            Kind::Gpu { index } if args.job != JobKind::Matmul || args.simulate => {
                return Err(Usage(format!(
                    "gpu:{index}: GPUs do --job matmul, on real threads only"
                )));
            }
            Kind::Emul { speed } if args.job == JobKind::Prompts => {
                return Err(Usage(format!(
                    "emul:{speed}x: nobody knows an answer without a model: --job prompts runs on \
                     cpu and card backends only"
                )));
            }
            _ => {}
        }
    }
    if args.simulate && args.job == JobKind::Prompts {
        return Err(Usage("--job prompts runs for real only, without --simulate".into()));
    }
    if real && !args.hot.is_empty() && !args.simulate {
        return Err(Usage(format!("--hot: what an item of --job {job} costs is its own business")));
    }
    if args.item_time.is_some() && args.job != JobKind::Sleep && !args.simulate {
        return Err(Usage(format!(
            "--item-time is for --job sleep and --simulate: what --job {job} takes is measured"
        )));
    }
    Ok(())
}

/// A product of such a shape, if there is room for it.
fn product(args: &Args, items: usize, k: usize, n: usize) -> anyhow::Result<Product> {
    if k == 0 || !k.is_multiple_of(QK_K) {
        let text = format!("--k {k}: expected a positive multiple of {QK_K}");
        return Err(Usage(text).into());
    }
    let Some(bytes) = n.checked_mul(4).filter(|bytes| *bytes > 0) else {
        return Err(Usage(format!("--n {n}: expected a number of rows above zero")).into());
    };
    let blocks = items.saturating_add(n).saturating_mul(k / QK_K);
    room(args, Job::new(items, bytes), blocks.saturating_mul(Q4_K_BLOCK_BYTES))?;
    Ok(Product::synthetic(items, k, n, args.seed)?)
}

/// The job, if there is memory for it and `more`.
fn room(args: &Args, job: Job, more: usize) -> Result<Job, Usage> {
    let bytes = job.check(args.backends.0.len()).map_err(|error| Usage(error.to_string()))?;
    // Outputs, what they should be, and room to work in.
    let needed = bytes.saturating_mul(3).saturating_add(more);
    match bench::available_memory() {
        Some(available) if needed > available => Err(Usage(format!(
            "--items {}: they need about {} MiB, and {} MiB are available",
            job.items(),
            needed >> 20,
            available >> 20
        ))),
        _ => Ok(job),
    }
}
