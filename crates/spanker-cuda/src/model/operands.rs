// SPDX-License-Identifier: Apache-2.0
//! The operands of the kernel's instructions, by name: one struct for each kind, all of the same size.
//!
//! `operands.cuh` declares the same structs for the kernel. Its text is made from these, and a test compares the two.
//! What an instruction computes is not decided here.

use bytemuck::{Pod, Zeroable};

/// Declares structs that the kernel knows, with what the header needs to declare them in C.
macro_rules! shared_structs {
    ($(
        $(#[doc = $doc:literal])*
        struct $name:ident $(= $kind:ident)? {
            $( $(#[doc = $note:literal])* $field:ident: $type:ty $(as $c:literal)?, )*
        }
    )*) => {
        $(
            $(#[doc = $doc])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
            pub(crate) struct $name {
                $( $(#[doc = $note])* pub(crate) $field: $type, )*
            }
            $(
                impl Operands for $name {
                    const KIND: u32 = kind::$kind;
                }
            )?
        )*

        /// Every struct as the header declares it.
        #[cfg(test)]
        const STRUCTS: &[header::Struct] = &[$(
            header::Struct {
                name: stringify!($name),
                notes: &[$($doc),*],
                size: size_of::<$name>(),
                fields: &[$(
                    header::Field {
                        name: stringify!($field),
                        notes: &[$($note),*],
                        rust: stringify!($type),
                        c: [$($c,)? ""][0],
                        offset: std::mem::offset_of!($name, $field),
                        bytes: size_of::<$type>(),
                    },
                )*],
            },
        )*];
    };
}

/// Declares numbers that the kernel knows by the same names.
macro_rules! shared_numbers {
    ($( $(#[doc = $doc:literal])* $scope:ident $of:ident { $( $(#[doc = $note:literal])* $name:ident = $value:literal, )* } )*) => {
        $(
            $(#[doc = $doc])*
            pub(crate) mod $scope {
                $( $(#[doc = $note])* pub(crate) const $name: u32 = $value; )*
            }
        )*

        #[cfg(test)]
        const NUMBERS: &[header::Numbers] = &[$(
            header::Numbers {
                name: stringify!($of),
                notes: &[$($doc),*],
                values: &[$((stringify!($name), $scope::$name)),*],
            },
        )*];
    };
}

shared_numbers! {
    /// Kinds of instructions.
    kind Kind {
        EMBED = 1,
        NORM = 2,
        QUANTIZE = 3,
        MATMUL = 4,
        ROTATE = 5,
        KEEP_KV = 6,
        GATE = 7,
        ADD = 8,
        ATTEND = 9,
        FILL = 10,
        COPY = 11,
        VECTOR = 12,
        ROUND_Q4_K = 13,
        STREAMED = 14,
        ADD_ROW = 15,
        GATHER = 16,
        FOLD = 17,
        PACK = 18,
    }
    /// What a kind may come with: no grid barrier follows, because the next instruction is of another card.
    with With {
        JOINED = 256,
    }
    /// What becomes of a product's results: they are stored, added to what is there, or gate and up are combined.
    keep Keep {
        STORE = 0,
        INTO = 1,
        GATED = 2,
    }
    /// How the inputs of a streamed product are prepared: normed and rounded, or only rounded.
    ready Ready {
        NORMED = 1,
        ROUNDED = 2,
    }
    /// How words of several cards become one.
    fold FoldOf {
        SUM_F32 = 0,
        OR_U32 = 1,
    }
    /// What a streamed product polls dataflow slots for, as bits: its inputs, and what its results are added to.
    awaits Awaits {
        AWAITS_INPUT = 1,
        AWAITS_ADDED = 2,
    }
}

/// An instruction of the kernel: its kind, and the operands of that kind.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
pub(crate) struct Instruction {
    kind: u32,
    numbers: [u32; 19],
    addresses: [u64; 12],
}

/// Operands of a kind of instruction.
pub(crate) trait Operands: Pod {
    /// The kind.
    const KIND: u32;
}

impl Instruction {
    /// The kind.
    pub(crate) fn kind(&self) -> u32 {
        self.kind
    }

    /// An instruction with these operands.
    pub(crate) fn new<T: Operands>(operands: T) -> Instruction {
        Instruction { kind: T::KIND, ..bytemuck::cast(operands) }
    }

    /// The same instruction, after which blocks do not wait for each other.
    pub(super) fn joined(self) -> Instruction {
        Instruction { kind: self.kind | with::JOINED, ..self }
    }

    /// Whether blocks wait for each other after it.
    pub(super) fn is_joined(&self) -> bool {
        self.kind & with::JOINED != 0
    }

    /// The operands, if the instruction is of their kind.
    pub(crate) fn get<T: Operands>(&self) -> Option<&T> {
        (self.kind == T::KIND).then(|| bytemuck::cast_ref(self))
    }

    /// The same, to be changed.
    pub(crate) fn get_mut<T: Operands>(&mut self) -> Option<&mut T> {
        (self.kind == T::KIND).then(|| bytemuck::cast_mut(self))
    }
}

shared_structs! {
    /// A matrix of a product: the type of its weights, and its rows.
    struct Matrix {
        quant: u32,
        rows: u32,
    }

    /// Looks up the embeddings of tokens.
    struct Embed = EMBED {
        kind: u32,
        rows: u32,
        width: u32,
        quant: u32,
        /// The first token of the table, and how many it has.
        first: u32,
        count: u32,
        /// Whether a later instruction of the same kernel writes `into`.
        is_overwritten: u32,
        unused_numbers: [u32; 13],
        table: u64,
        into: u64,
        /// The tokens, in the tables of the step.
        ids: u64,
        unused: [u64; 5],
        /// The dataflow slot of the results, or 0.
        slot: u64,
        unused_addresses: [u64; 3],
    }

    /// RMS norm of rows.
    struct Norm = NORM {
        kind: u32,
        rows: u32,
        width: u32,
        epsilon: u32,
        unused_numbers: [u32; 16],
        from: u64,
        weight: u64,
        into: u64,
        unused_addresses: [u64; 9],
    }

    /// Rounds rows to blocks of a type.
    struct Quantize = QUANTIZE {
        kind: u32,
        rows: u32,
        width: u32,
        quant: u32,
        unused_numbers: [u32; 16],
        from: u64,
        into: u64,
        unused_addresses: [u64; 10],
    }

    /// A product of many rows of inputs.
    struct Matmul = MATMUL {
        kind: u32,
        rows: u32,
        width: u32,
        /// Rows of weights.
        outs: u32,
        input_quant: u32,
        weight_quant: u32,
        /// Rows of weights of a tile, where tensor cores multiply.
        tile_outs: u32,
        unused_numbers: [u32; 13],
        inputs: u64,
        weights: u64,
        out: u64,
        /// Inputs as tensor cores read them, or 0.
        packed: u64,
        unused_addresses: [u64; 8],
    }

    /// Rearranges blocks of inputs of a product for tensor cores.
    struct Pack = PACK {
        kind: u32,
        rows: u32,
        width: u32,
        /// Whether words of both halves of a block take turns: for weights of four bits.
        is_interleaved: u32,
        /// Whether blocks are those of Q8_K.
        is_long: u32,
        unused_numbers: [u32; 15],
        from: u64,
        into: u64,
        unused_addresses: [u64; 10],
    }

    /// Where a row of a step lies: its position, and the first entry of its block table.
    struct RowAt {
        position: u32,
        table: u32,
    }

    /// Rotary embedding of heads, by the positions of their rows.
    struct Rotate = ROTATE {
        kind: u32,
        rows: u32,
        heads: u32,
        head_size: u32,
        dims: u32,
        /// Whether the two numbers of a pair are half of `dims` apart, and not neighbours.
        pairs: u32,
        /// Positions of the table.
        positions: u32,
        unused_numbers: [u32; 13],
        data: u64,
        table: u64,
        /// Where rows lie.
        at: u64,
        unused_addresses: [u64; 9],
    }

    /// Stores keys and values of rows in the blocks of their sequences.
    struct KeepKv = KEEP_KV {
        kind: u32,
        rows: u32,
        kv_heads: u32,
        head_size: u32,
        /// The type of the KV cache: F16 or Q8_0.
        quant: u32,
        unused_numbers: [u32; 15],
        keys: u64,
        values: u64,
        /// The first block of the layer.
        cache: u64,
        /// Where rows lie, and block tables.
        at: u64,
        tables: u64,
        unused_addresses: [u64; 7],
    }

    /// Combines gate and up.
    struct Gate = GATE {
        kind: u32,
        elements: u32,
        unused_numbers: [u32; 18],
        gate: u64,
        up: u64,
        into: u64,
        unused_addresses: [u64; 9],
    }

    /// Adds `more` to `into`.
    struct Add = ADD {
        kind: u32,
        elements: u32,
        unused_numbers: [u32; 18],
        into: u64,
        more: u64,
        unused_addresses: [u64; 10],
    }

    /// Adds one row to rows.
    struct AddRow = ADD_ROW {
        kind: u32,
        rows: u32,
        width: u32,
        unused_numbers: [u32; 17],
        into: u64,
        row: u64,
        unused_addresses: [u64; 10],
    }

    /// Attention of rows of queries over the blocks of their sequences.
    struct Attend = ATTEND {
        kind: u32,
        rows: u32,
        heads: u32,
        kv_heads: u32,
        head_size: u32,
        group: u32,
        offset: u32,
        scale: u32,
        /// Whether the last key and value are new: they are rotated, and stored in the KV cache.
        is_fresh: u32,
        dims: u32,
        pairs: u32,
        /// The type of blocks of results, or 0.
        block_quant: u32,
        /// Positions whose values are in shared memory at a time: whole blocks.
        near: u32,
        /// Whether queries, new keys and new values are polled for in dataflow slots.
        is_awaiting: u32,
        /// The type of the KV cache: F16 or Q8_0.
        quant: u32,
        /// Whether rows of a sequence may go through its blocks together.
        is_tiled: u32,
        unused_numbers: [u32; 4],
        queries: u64,
        /// The first block of the layer.
        cache: u64,
        /// Where rows lie, and block tables.
        at: u64,
        tables: u64,
        into: u64,
        /// Of rotary embeddings.
        table: u64,
        new_keys: u64,
        new_values: u64,
        /// Blocks of results.
        blocks: u64,
        /// A second place for results, or 0.
        store: u64,
        unused_addresses: [u64; 2],
    }

    /// Fills words with a pattern.
    struct Fill = FILL {
        kind: u32,
        words: u32,
        pattern: u32,
        unused_numbers: [u32; 17],
        into: u64,
        unused_addresses: [u64; 11],
    }

    /// Copies bytes, an even number of them.
    struct CopyBytes = COPY {
        kind: u32,
        bytes: u32,
        unused_numbers: [u32; 18],
        from: u64,
        into: u64,
        unused_addresses: [u64; 10],
    }

    /// Gives parts of rows that some cards have to some cards, which then have them in whole rows.
    struct Gather = GATHER {
        kind: u32,
        rows: u32,
        /// Bytes of a unit: 2, 4 or 16.
        unit: u32,
        /// Units of a whole row.
        width: u32,
        /// Cards that give, and cards that get.
        givers: u32,
        getters: u32,
        /// Units of a row before each part, and of each part.
        starts: [u32; 6],
        lengths: [u32; 6],
        unused_numbers: [u32; 2],
        from: [u64; 6],
        into: [u64; 6],
    }

    /// Folds words of cards in the order of their ranks, and gives the results to all of them.
    struct FoldWords = FOLD {
        kind: u32,
        words: u32,
        fold: u32,
        cards: u32,
        unused_numbers: [u32; 16],
        data: [u64; 12],
    }

    /// Products of one row of inputs with up to three matrices.
    struct Vector = VECTOR {
        kind: u32,
        width: u32,
        input_quant: u32,
        /// Whether the inputs are normed first.
        is_normed: u32,
        epsilon: u32,
        keep: u32,
        tile_rows: u32,
        matrices: [Matrix; 3],
        unused: u32,
        /// Tiles of the first matrix, of the first two, and of all.
        tile_ends: [u32; 3],
        unused_numbers: [u32; 3],
        input: u64,
        norm_weight: u64,
        weights: [u64; 3],
        outs: [u64; 3],
        unused_addresses: [u64; 4],
    }

    /// A `Vector` that keeps its results `GATED`: the products of gate and up, combined.
    struct GatedVector = VECTOR {
        kind: u32,
        width: u32,
        input_quant: u32,
        is_normed: u32,
        epsilon: u32,
        keep: u32,
        tile_rows: u32,
        matrices: [Matrix; 3],
        /// The type of blocks of results, or 0.
        block_quant: u32,
        tile_ends: [u32; 3],
        unused_numbers: [u32; 3],
        input: u64,
        norm_weight: u64,
        weights: [u64; 3],
        out: u64,
        /// How many results of each block are there.
        counters: u64,
        /// Blocks of results.
        blocks: u64,
        unused_addresses: [u64; 4],
    }

    /// Rounds rows of Q4_K to inputs of products.
    struct RoundQ4K = ROUND_Q4_K {
        kind: u32,
        blocks: u32,
        unused_numbers: [u32; 18],
        from: u64,
        into: u64,
        unused_addresses: [u64; 10],
    }

    /// Products of one row of inputs with up to three matrices whose weights are prefetched.
    struct Streamed = STREAMED {
        kind: u32,
        width: u32,
        awaits: u32,
        ready: u32,
        epsilon: u32,
        keep: u32,
        unused: u32,
        /// Pairs of rows of the first matrix, and of the first two. A gated pair is a row of each of two matrices.
        pair_ends: [u32; 2],
        rows: [u32; 3],
        unused_numbers: [u32; 5],
        /// Pairs of every block, and blocks that have one more.
        block_pairs: u32,
        larger_blocks: u32,
        /// The index of the next such instruction and one, or 0.
        next: u32,
        input: u64,
        norm_weight: u64,
        weights: [u64; 3],
        outs: [u64; 3],
        /// What results are added to.
        added: u64,
        /// Second places for results, or 0.
        stores: [u64; 3],
    }

    /// What changes from step to step.
    struct Step {
        /// The counter of the grid barrier, and its value before the step.
        barrier: u64 as "u64 *",
        arrived: u64,
        /// The first instruction whose weights are prefetched: its index and one, or 0.
        streamed: u32,
        /// Where its ring of slots is in shared memory.
        ring: u32,
        /// Dataflow slots of the next step, in parts of 16 bytes, which this step resets.
        unwritten: u64 as "uint4 *",
        unwritten_parts: u64,
        /// When each instruction begins in the first block, and when the last one ends, in nanoseconds; or null.
        times: u64 as "u64 *",
    }
}

#[cfg(test)]
mod header;
