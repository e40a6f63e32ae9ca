// SPDX-License-Identifier: Apache-2.0
//! What a leader and its workers say before they are ranks of a model: which model it is, by content, who has it, and
//! the beginning of its file for those that have not. Nothing that the other end says is believed: lengths are bounded,
//! bytes are compared with their hashes, and hashes with the number that was offered.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ggml_spanker::GgufFile;
use serde::{Deserialize, Serialize};
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};
use spanker_llm::{LlmError, Network, Store, fetch_chunks, reading_time, supply_chunks};

use crate::content::cache::{Cache, Copy, is_id};
use crate::content::{Manifest, manifest_bytes};
use crate::error::chain;

const LEADER: usize = 0;
/// The longest offer.
const MOST_OFFER: usize = 4 << 10;
/// The most that a file can have before its weights.
const MOST_HEADER: u64 = 1 << 30;
/// How long a worker waits for an offer at the most: the leader has hashed its file before it made the group.
const OFFERING: Duration = Duration::from_secs(60);
/// Tensors that are read when a model is opened.
const ANGLES: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

const HAS: u8 = 0;
const LACKS: u8 = 1;

/// The model that a leader runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    version: String,
    id: String,
    pub(super) name: String,
    length: u64,
    /// Bytes of its file before the weights; nothing for a model in several files, which cannot be sent.
    header: Option<u64>,
    timeout_ms: u64,
}

impl Offer {
    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    fn from_bytes(bytes: &[u8]) -> Result<Offer, String> {
        let offer = (bytes.len() <= MOST_OFFER).then(|| serde_json::from_slice(bytes).ok());
        let offer: Offer = offer.flatten().ok_or("what the leader offers makes no sense")?;
        let own = env!("CARGO_PKG_VERSION");
        if offer.version != own {
            let theirs = crate::printable(&offer.version);
            return Err(format!("this worker is spanker {own}, the leader {theirs}"));
        }
        let header = offer.header.unwrap_or(0);
        let sound = is_id(&offer.id)
            && manifest_bytes(offer.length).is_some()
            && header <= offer.length.min(MOST_HEADER)
            && (10..=600_000).contains(&offer.timeout_ms);
        match sound {
            true => Ok(Offer { name: crate::printable(&offer.name), ..offer }),
            false => Err("what the leader offers makes no sense".into()),
        }
    }

    /// How long ranks wait for each other.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// Until when a worker may look whether it has the model: it may have to hash a file of its own.
    fn looked_at(&self) -> Instant {
        Instant::now() + self.timeout().max(reading_time(self.length))
    }
}

fn refused(fabric: &mut dyn Fabric, reason: impl Into<String>) -> FabricError {
    let (rank, reason) = (fabric.rank(), reason.into());
    fabric.abort(FabricError::Refused { rank, reason })
}

fn message(bytes: &[u8]) -> Message {
    Pool::default().write(bytes.len(), |out| out.copy_from_slice(bytes))
}

/// A model that is offered, and what ranks wait for each other.
#[derive(Clone)]
pub(super) struct Offered {
    pub(super) path: PathBuf,
    pub(super) network: Arc<Network<GgufFile>>,
    pub(super) manifest: Arc<Manifest>,
    pub(super) timeout: Duration,
}

/// Offers a model to the other ranks of a group, and gives those that have not got it what it takes to open it.
pub(super) fn offer(fabric: &mut dyn Fabric, offered: &Offered) -> Result<(), FabricError> {
    let Offered { path, network, manifest, timeout } = offered;
    let timeout = *timeout;
    let others: Vec<usize> = (0..fabric.ranks()).filter(|&rank| rank != LEADER).collect();
    let (header, bytes) = (network.header(), network.bytes());
    let is_whole = std::fs::metadata(path).is_ok_and(|at| at.len() == bytes.len() as u64);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let offered = Offer {
        version: env!("CARGO_PKG_VERSION").into(),
        id: manifest.id(),
        name: name.unwrap_or_default(),
        length: manifest.length(),
        header: is_whole.then(|| header.data_offset()),
        timeout_ms: timeout.as_millis().clamp(10, 600_000) as u64,
    };
    let call = &Call::BARRIER;
    let first = message(&offered.to_bytes());
    let sends: Vec<_> = others.iter().map(|&rank| (rank, first.clone())).collect();
    let answers = fabric.exchange(call, &sends, &others, offered.looked_at())?;
    let mut sends = Vec::new();
    let hashes = message(&manifest.to_bytes());
    for (answer, &rank) in answers.iter().zip(&others) {
        match answer.bytes() {
            [HAS] => {}
            [LACKS] => sends.push((rank, hashes.clone())),
            _ => return Err(refused(fabric, format!("what rank {rank} answers makes no sense"))),
        }
    }
    fabric.exchange(call, &sends, &[], Instant::now() + timeout.max(Duration::from_secs(20)))?;
    // What comes before the weights, then what is read of them when the model is opened.
    for _ in 0..2 {
        supply_chunks(fabric, bytes, &others, timeout, &mut |_, _| {})?;
    }
    fabric.barrier(offered.looked_at())
}

/// Where a worker looks for models.
#[derive(Debug, Clone)]
pub(crate) struct Shelf {
    /// Files of its own.
    pub(crate) files: Vec<PathBuf>,
    /// Folders with files of its own.
    pub(crate) folders: Vec<PathBuf>,
    pub(crate) cache: Cache,
}

/// A model that a worker has, or has begun to have.
pub(super) struct Taken {
    pub(super) offer: Offer,
    pub(super) network: Arc<Network<GgufFile>>,
    pub(super) source: Source,
}

/// Where a worker has a model from.
pub(super) enum Source {
    /// A file of its own.
    File { path: PathBuf, length: u64 },
    /// What came over the network.
    Copy(Box<Copy>),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Source::File { path, .. } => path,
            Source::Copy(copy) => copy.path(),
        }
    }

    /// Bytes that came over the network since the model was offered.
    pub(super) fn fetched(&self) -> u64 {
        match self {
            Source::File { .. } => 0,
            Source::Copy(copy) => copy.fetched(),
        }
    }
}

impl Store for Source {
    fn length(&self) -> u64 {
        match self {
            Source::File { length, .. } => *length,
            Source::Copy(copy) => copy.length(),
        }
    }

    fn missing(&self, ranges: &[Range<u64>]) -> Result<Vec<u64>, String> {
        match self {
            Source::File { .. } => Ok(Vec::new()),
            Source::Copy(copy) => copy.missing(ranges),
        }
    }

    fn put(&self, number: u64, bytes: &[u8]) -> Result<(), String> {
        match self {
            Source::File { .. } => Err(format!("chunk {number} was not asked for")),
            Source::Copy(copy) => copy.put(number, bytes),
        }
    }

    fn complete(&self) -> Result<(), String> {
        match self {
            Source::File { .. } => Ok(()),
            Source::Copy(copy) => copy.complete(),
        }
    }
}

impl Shelf {
    /// A file of this worker's own that is the model.
    fn own(&self, offer: &Offer) -> Option<PathBuf> {
        let listed = |folder: &PathBuf| {
            let entries = folder.read_dir().into_iter().flatten().flatten();
            let paths = entries.map(|entry| entry.path());
            let is_model = |path: &PathBuf| path.extension().is_some_and(|end| end == "gguf");
            // Others are not worth a look.
            let long = |path: &PathBuf| {
                std::fs::metadata(path).is_ok_and(|file| file.len() == offer.length)
            };
            paths.filter(is_model).filter(long).collect::<Vec<_>>()
        };
        let mut files = self.files.iter().cloned().chain(self.folders.iter().flat_map(listed));
        files.find(|path| {
            let file = GgufFile::open(path).ok();
            let file = file.filter(|file| file.bytes().len() as u64 == offer.length);
            file.is_some_and(|file| Manifest::of_file(path, file.bytes()).id() == offer.id)
        })
    }
}

/// Takes the model that a leader offers.
pub(super) fn take(fabric: &mut dyn Fabric, shelf: &Shelf) -> Result<Taken, LlmError> {
    let call = &Call::BARRIER;
    let offered = fabric.exchange(call, &[], &[LEADER], Instant::now() + OFFERING)?;
    let offer = offered.first().map_or(Err(String::new()), |one| Offer::from_bytes(one.bytes()));
    let offer = offer.map_err(|reason| refused(fabric, reason))?;
    let source = match shelf.own(&offer) {
        Some(path) => {
            fabric.exchange(call, &[(LEADER, message(&[HAS]))], &[], offer.looked_at())?;
            Source::File { path, length: offer.length }
        }
        None => Source::Copy(Box::new(begin(fabric, shelf, &offer)?)),
    };
    let header = offer.header.unwrap_or(0);
    fetch_chunks(fabric, &source, std::slice::from_ref(&(0..header)), offer.timeout())?;
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", source.path().display());
    let file = GgufFile::open(source.path()).map_err(|error| named(&chain(&error)));
    let file = file.map_err(|reason| refused(fabric, reason))?;
    let angles = ANGLES.iter().filter_map(|name| file.header().tensors().get(*name));
    let angles: Vec<Range<u64>> = angles.map(|tensor| file.header().range(tensor)).collect();
    fetch_chunks(fabric, &source, &angles, offer.timeout())?;
    let network = Network::with_header(file.header().clone(), file);
    let network = network.map_err(|error| refused(fabric, named(&error)))?;
    fabric.barrier(offer.looked_at())?;
    Ok(Taken { offer, network: Arc::new(network), source })
}

/// The copy of a model that this worker has no file of.
fn begin(fabric: &mut dyn Fabric, shelf: &Shelf, offer: &Offer) -> Result<Copy, FabricError> {
    let call = &Call::BARRIER;
    if offer.header.is_none() {
        let reason = format!(
            "{} is in several files, and this worker has none of them; give it a copy with -m",
            offer.name
        );
        return Err(refused(fabric, reason));
    }
    let known = shelf.cache.manifest(&offer.id, offer.length);
    let answer = message(&[if known.is_some() { HAS } else { LACKS }]);
    let until = offer.looked_at();
    let receives: &[usize] = if known.is_some() { &[] } else { &[LEADER] };
    let hashes = fabric.exchange(call, &[(LEADER, answer)], receives, until)?;
    let sent = || {
        let hashes = hashes.first()?;
        Manifest::from_bytes(offer.length, &offer.id, hashes.bytes())
    };
    let manifest = known.or_else(sent);
    let copy = match manifest {
        Some(manifest) => shelf.cache.open(manifest, &offer.name),
        None => Err(format!("the hashes of {} are not those that were offered", offer.name)),
    };
    copy.map_err(|reason| refused(fabric, reason))
}

#[cfg(test)]
mod tests;
