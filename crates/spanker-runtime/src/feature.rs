// SPDX-License-Identifier: Apache-2.0
//! Which minor version of the ABI brought which request and which kind of work: the header's `SPANKER_SINCE_*`.
//! Programs ask this table what a card can do; nobody finds out by trying.

use std::fmt;

use crate::abi::{ABI_VERSION_MAJOR, AbiVersion};
use crate::work::{Activation, Work};

macro_rules! features {
    ($($(#[$doc:meta])* $name:ident = $c_name:ident $text:literal since $minor:literal;)*) => {
        /// A part of the ABI that came after its first version. PING and GET_VERSION are no features: every card has
        /// them.
        ///
        /// # Examples
        ///
        /// ```
        /// use spanker_runtime::{AbiVersion, Feature};
        /// let old = AbiVersion { major: 0, minor: 2, patch: 0 };
        /// assert!(old.has(Feature::PortInfo) && !old.has(Feature::WorkAttend));
        /// assert_eq!(Feature::WorkAttend.to_string(), "work ATTEND");
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Feature { $($(#[$doc])* $name,)* }

        impl Feature {
            /// Every feature, in the order of the header.
            pub const ALL: &'static [Feature] = &[$(Feature::$name,)*];

            /// The minor version that brought it.
            #[must_use]
            pub const fn since(self) -> u16 {
                match self { $(Feature::$name => $minor,)* }
            }

            /// Its name in errors.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Feature::$name => $text,)* }
            }
        }

        /// The table as Rust sees it, under the names of C.
        #[cfg(test)]
        pub(crate) fn values() -> Vec<(String, u64)> {
            vec![$((concat!("SPANKER_SINCE_", stringify!($c_name)).to_owned(), $minor),)*]
        }
    };
}

features! {
    /// See [`crate::SpankerControl::info`].
    CardInfo = CARD_INFO "request CARD_INFO" since 2;
    /// See [`crate::SpankerControl::port`]: without it, links are not discovered.
    PortInfo = PORT_INFO "request PORT_INFO" since 2;
    /// See [`crate::SpankerControl::allocate`].
    Allocate = ALLOCATE "request ALLOCATE" since 2;
    /// See [`crate::SpankerControl::free`].
    Free = FREE "request FREE" since 2;
    /// See [`crate::SpankerControl::write`].
    Write = WRITE "request WRITE" since 2;
    /// See [`crate::SpankerControl::read`].
    Read = READ "request READ" since 2;
    /// See [`crate::SpankerControl::submit`].
    Submit = SUBMIT "request SUBMIT" since 2;
    /// See [`crate::SpankerControl::wait`].
    Wait = WAIT "request WAIT" since 2;
    /// See [`crate::SpankerControl::counters`].
    Counters = COUNTERS "request COUNTERS" since 2;
    /// See [`crate::SpankerControl::abort`].
    Reset = RESET "request RESET" since 2;
    /// See [`crate::SpankerControl::state`].
    State = STATE "request STATE" since 2;
    /// See [`crate::SpankerControl::records`].
    Records = RECORDS "request RECORDS" since 2;
    /// [`Work::Copy`].
    WorkCopy = WORK_COPY "work COPY" since 2;
    /// [`Work::Fill`].
    WorkFill = WORK_FILL "work FILL" since 2;
    /// [`Work::Reduce`].
    WorkReduce = WORK_REDUCE "work REDUCE" since 2;
    /// [`Work::Matmul`] of two Q4_K matrices.
    WorkMatmul = WORK_MATMUL "work MATMUL" since 2;
    /// [`Work::Send`].
    WorkSend = WORK_SEND "work SEND" since 2;
    /// [`Work::Receive`].
    WorkReceive = WORK_RECEIVE "work RECEIVE" since 2;
    /// [`Work::Fence`].
    WorkFence = WORK_FENCE "work FENCE" since 2;
    /// [`Work::Embed`].
    WorkEmbed = WORK_EMBED "work EMBED" since 3;
    /// [`Work::Norm`].
    WorkNorm = WORK_NORM "work NORM" since 3;
    /// [`Work::Quantize`].
    WorkQuantize = WORK_QUANTIZE "work QUANTIZE" since 3;
    /// [`Work::Rotate`].
    WorkRotate = WORK_ROTATE "work ROTATE" since 3;
    /// [`Work::Halve`].
    WorkHalve = WORK_HALVE "work HALVE" since 3;
    /// [`Work::Attend`].
    WorkAttend = WORK_ATTEND "work ATTEND" since 3;
    /// [`Work::Gate`].
    WorkGate = WORK_GATE "work GATE" since 3;
    /// [`Work::Rows`].
    WorkRows = WORK_ROWS "work ROWS" since 3;
    /// [`Work::Best`].
    WorkBest = WORK_BEST "work BEST" since 3;
    /// [`Work::Matmul`] of any other types than two Q4_K matrices.
    MatmulTypes = MATMUL_TYPES "work MATMUL of other types than Q4_K by Q4_K" since 3;
    /// [`Work::Write`].
    WorkWrite = WORK_WRITE "work WRITE" since 4;
    /// [`Work::AddRow`].
    WorkAddRow = WORK_ADD_ROW "work ADD_ROW" since 4;
    /// [`Work::RotateRows`].
    WorkRotateRows = WORK_ROTATE_ROWS "work ROTATE_ROWS" since 4;
    /// [`Work::Keep`].
    WorkKeep = WORK_KEEP "work KEEP" since 4;
    /// [`Work::AttendBlocks`].
    WorkAttendBlocks = WORK_ATTEND_BLOCKS "work ATTEND_BLOCKS" since 4;
    /// [`Work::Route`].
    WorkRoute = WORK_ROUTE "work ROUTE" since 5;
    /// [`Work::MatmulExperts`].
    WorkMatmulExperts = WORK_MATMUL_EXPERTS "work MATMUL_EXPERTS" since 5;
    /// [`Work::Combine`].
    WorkCombine = WORK_COMBINE "work COMBINE" since 5;
    /// [`Work::Scale`].
    WorkScale = WORK_SCALE "work SCALE" since 5;
    /// [`Work::Gate`] of any other activation than SiLU.
    WorkActivate = WORK_ACTIVATE "work ACTIVATE" since 5;
    /// [`Work::AttendBlocks`] with a window, a cap or sinks.
    WorkAttendScores = WORK_ATTEND_SCORES "work ATTEND_SCORES" since 5;
    /// [`Work::Keep`] and [`Work::AttendBlocks`] of keys and values as Q4_0.
    KvQ4 = KV_Q4 "work KEEP and ATTEND_BLOCKS of Q4_0" since 5;
    /// [`Work::AddPicked`].
    WorkAddPicked = WORK_ADD_PICKED "work ADD_PICKED" since 5;
}

/// GGML's number of Q4_0.
const Q4_0: u32 = 2;
/// GGML's number of Q4_K.
const Q4_K: u32 = 12;

impl Feature {
    /// The version that brought it.
    #[must_use]
    pub const fn since_version(self) -> AbiVersion {
        AbiVersion { major: ABI_VERSION_MAJOR, minor: self.since(), patch: 0 }
    }

    /// The feature that work needs; `None` for work that this crate does not know.
    #[must_use]
    pub fn of_work(work: &Work) -> Option<Feature> {
        Some(match work {
            Work::Copy { .. } => Feature::WorkCopy,
            Work::Fill { .. } => Feature::WorkFill,
            Work::Reduce { .. } => Feature::WorkReduce,
            Work::Matmul { types: [Q4_K, Q4_K], .. } => Feature::WorkMatmul,
            Work::Matmul { .. } => Feature::MatmulTypes,
            Work::Send { .. } => Feature::WorkSend,
            Work::Receive { .. } => Feature::WorkReceive,
            Work::Fence { .. } => Feature::WorkFence,
            Work::Embed { .. } => Feature::WorkEmbed,
            Work::Norm { .. } => Feature::WorkNorm,
            Work::Quantize { .. } => Feature::WorkQuantize,
            Work::Rotate { .. } => Feature::WorkRotate,
            Work::Halve { .. } => Feature::WorkHalve,
            Work::Attend { .. } => Feature::WorkAttend,
            Work::Gate { activation: Activation::Silu, .. } => Feature::WorkGate,
            Work::Gate { .. } => Feature::WorkActivate,
            Work::Scale { .. } => Feature::WorkScale,
            Work::Rows { .. } => Feature::WorkRows,
            Work::Best { .. } => Feature::WorkBest,
            Work::Write { .. } => Feature::WorkWrite,
            Work::AddRow { .. } => Feature::WorkAddRow,
            Work::RotateRows { .. } => Feature::WorkRotateRows,
            Work::Keep { cache, .. } | Work::AttendBlocks { cache, .. } if cache.quant == Q4_0 => {
                Feature::KvQ4
            }
            Work::Keep { .. } => Feature::WorkKeep,
            Work::AttendBlocks { scores, .. } if scores.is_plain() => Feature::WorkAttendBlocks,
            Work::AttendBlocks { .. } => Feature::WorkAttendScores,
            Work::Route { .. } => Feature::WorkRoute,
            Work::MatmulExperts { .. } => Feature::WorkMatmulExperts,
            Work::Combine { .. } => Feature::WorkCombine,
            Work::AddPicked { .. } => Feature::WorkAddPicked,
            _ => return None,
        })
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl AbiVersion {
    /// Whether a card of this version has a feature. One of a newer minor version has everything that is known here;
    /// of another major version nothing is known.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.major == ABI_VERSION_MAJOR && self.minor >= feature.since()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::ABI_VERSION_MINOR;

    #[test]
    fn no_feature_is_newer_than_this_abi_and_none_is_of_its_first_version() {
        for feature in Feature::ALL {
            assert!((2..=ABI_VERSION_MINOR).contains(&feature.since()), "{feature}");
        }
    }

    #[test]
    fn released_versions_keep_their_features() {
        let of = |minor: u16| {
            let version = AbiVersion { major: 0, minor, patch: 0 };
            Feature::ALL.iter().filter(|feature| version.has(**feature)).count()
        };
        // Twelve requests and seven kinds of work; nine more kinds, and more types of products.
        let known: Vec<usize> = (0..=ABI_VERSION_MINOR + 1).map(of).collect();
        assert_eq!(known, [0, 0, 19, 29, 34, 42, 42]);
        assert!(!AbiVersion { major: 1, minor: 9, patch: 0 }.has(Feature::CardInfo));
    }
}
