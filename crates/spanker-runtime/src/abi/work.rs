// SPDX-License-Identifier: Apache-2.0
//! The mirror of the descriptors' structs: heads, places, and one struct for each kind of work. What they
//! mean is said at [`crate::Work`].

use bytemuck::{Pod, Zeroable};

mirror! {
    /// The head of a descriptor.
    struct RawWork = spanker_work {
        /// Bytes of the whole descriptor.
        size: u32,
        /// `WORK_*`.
        kind: u16,
        /// [`WORK_VERSION`](super::WORK_VERSION).
        version: u16,
        /// The place of the transfer to wait for, from 1, or 0.
        after: u32,
        /// 0.
        reserved: u32,
    }
    /// Somewhere in a buffer.
    struct RawPlace = spanker_place {
        /// The handle.
        buffer: u64,
        /// The first byte.
        offset: u64,
    }
    /// See [`crate::Work::Copy`].
    struct RawCopy = spanker_work_copy {
        /// The head.
        head: RawWork,
        /// The source.
        from: RawPlace,
        /// The destination.
        into: RawPlace,
        /// Bytes.
        length: u64,
    }
    /// See [`crate::Work::Fill`].
    struct RawFill = spanker_work_fill {
        /// The head.
        head: RawWork,
        /// The destination.
        into: RawPlace,
        /// Bytes.
        length: u64,
        /// What is repeated.
        pattern: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Reduce`]. The sources follow.
    struct RawReduce = spanker_work_reduce {
        /// The head.
        head: RawWork,
        /// The destination.
        into: RawPlace,
        /// Elements.
        elements: u64,
        /// `SPANKER_TYPE_*`.
        r#type: u16,
        /// `SPANKER_OP_*`.
        op: u16,
        /// What the result is divided by, if more than 1.
        divisor: u32,
        /// Sources.
        count: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Matmul`].
    struct RawMatmul = spanker_work_matmul {
        /// The head.
        head: RawWork,
        /// The rows of a.
        a: RawPlace,
        /// The rows of b.
        b: RawPlace,
        /// The product.
        out: RawPlace,
        /// Rows of a.
        m: u64,
        /// Columns of both.
        k: u64,
        /// Rows of b.
        n: u64,
        /// GGML's number of a's type.
        a_type: u32,
        /// GGML's number of b's type.
        b_type: u32,
    }
    /// See [`crate::Work::Send`].
    struct RawSend = spanker_work_send {
        /// The head.
        head: RawWork,
        /// The source.
        from: RawPlace,
        /// Bytes.
        length: u64,
        /// The port.
        port: u32,
        /// What the receiver must expect.
        tag: u32,
    }
    /// See [`crate::Work::Receive`].
    struct RawReceive = spanker_work_receive {
        /// The head.
        head: RawWork,
        /// The destination.
        into: RawPlace,
        /// Bytes.
        length: u64,
        /// The port.
        port: u32,
        /// What the sender must say.
        tag: u32,
        /// `SPANKER_RECEIVE_*`.
        mode: u16,
        /// `SPANKER_TYPE_*`, for a fold.
        r#type: u16,
        /// `SPANKER_OP_*`, for a fold.
        op: u16,
        /// 0.
        reserved: u16,
    }
    /// See [`crate::Work::Fence`].
    struct RawFence = spanker_work_fence {
        /// The head.
        head: RawWork,
        /// The card time to wait for.
        not_before_ps: u64,
    }
    /// See [`crate::Work::Embed`].
    struct RawEmbed = spanker_work_embed {
        /// The head.
        head: RawWork,
        /// Rows of weights.
        table: RawPlace,
        /// Which rows are wanted.
        ids: RawPlace,
        /// The rows as f32.
        into: RawPlace,
        /// How many are wanted.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// GGML's number of the table's type.
        quant: u32,
        /// The number of the table's first row.
        first: u32,
        /// Rows of the table.
        count: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Norm`].
    struct RawNorm = spanker_work_norm {
        /// The head.
        head: RawWork,
        /// The rows.
        from: RawPlace,
        /// One row of weights.
        weight: RawPlace,
        /// The result.
        into: RawPlace,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// The bits of an f32.
        epsilon: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Quantize`].
    struct RawQuantize = spanker_work_quantize {
        /// The head.
        head: RawWork,
        /// The rows as f32.
        from: RawPlace,
        /// The rows as blocks.
        into: RawPlace,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// GGML's number of the blocks' type.
        quant: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Rotate`].
    struct RawRotate = spanker_work_rotate {
        /// The head.
        head: RawWork,
        /// The rows.
        data: RawPlace,
        /// Cosines and sines of each row.
        table: RawPlace,
        /// Rows.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// Of these, numbers that turn.
        dims: u64,
        /// `SPANKER_PAIRS_*`.
        pairs: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Halve`].
    struct RawHalve = spanker_work_halve {
        /// The head.
        head: RawWork,
        /// The f32s.
        from: RawPlace,
        /// The f16s.
        into: RawPlace,
        /// How many.
        elements: u64,
    }
    /// See [`crate::Work::Attend`].
    struct RawAttend = spanker_work_attend {
        /// The head.
        head: RawWork,
        /// Rows of queries.
        queries: RawPlace,
        /// Keys of all positions.
        keys: RawPlace,
        /// Values of all positions.
        values: RawPlace,
        /// The result.
        into: RawPlace,
        /// Rows of queries.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Heads of a position.
        kv_heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// Heads of queries to one of keys and values.
        group: u64,
        /// What is added to the number of a head of queries before it is divided by the group.
        offset: u64,
        /// Positions before the first row.
        past: u64,
        /// The bits of an f32.
        scale: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Gate`].
    struct RawGate = spanker_work_gate {
        /// The head.
        head: RawWork,
        /// What opens.
        gate: RawPlace,
        /// What passes.
        up: RawPlace,
        /// The result.
        into: RawPlace,
        /// How many.
        elements: u64,
    }
    /// See [`crate::Work::Rows`].
    struct RawRows = spanker_work_rows {
        /// The head.
        head: RawWork,
        /// The first block of the source.
        from: RawPlace,
        /// The first block of the destination.
        into: RawPlace,
        /// Blocks.
        rows: u64,
        /// Bytes of a block.
        length: u64,
        /// Bytes from a block of the source to the next.
        from_stride: u64,
        /// Bytes from a block of the destination to the next.
        into_stride: u64,
    }
    /// See [`crate::Work::Best`].
    struct RawBest = spanker_work_best {
        /// The head.
        head: RawWork,
        /// The numbers.
        from: RawPlace,
        /// The best of them with their places.
        into: RawPlace,
        /// How many there are.
        count: u64,
        /// How many are wanted.
        k: u32,
        /// What is added to places.
        first: u32,
    }
    /// See [`crate::Work::Write`]. Its bytes follow.
    struct RawWrite = spanker_work_write {
        /// The head.
        head: RawWork,
        /// The destination.
        into: RawPlace,
        /// Bytes.
        length: u64,
    }
    /// See [`crate::Work::AddRow`].
    struct RawAddRow = spanker_work_add_row {
        /// The head.
        head: RawWork,
        /// The rows.
        into: RawPlace,
        /// What is added.
        row: RawPlace,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
    }
    /// Where a row of a step lies.
    struct RawRow = spanker_row {
        /// Its position.
        position: u32,
        /// The first entry of its block table.
        table: u32,
    }
    /// See [`crate::Work::RotateRows`].
    struct RawRotateRows = spanker_work_rotate_rows {
        /// The head.
        head: RawWork,
        /// The rows.
        data: RawPlace,
        /// Cosines and sines of each position.
        table: RawPlace,
        /// Where each row lies.
        at: RawPlace,
        /// Positions of the table.
        positions: u64,
        /// Rows.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// Of these, numbers that turn.
        dims: u64,
        /// `SPANKER_PAIRS_*`.
        pairs: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`spanker_plan::KvCache`].
    struct RawKvCache = spanker_kv_cache {
        /// The first block.
        blocks: RawPlace,
        /// Where each row lies.
        rows: RawPlace,
        /// Block tables.
        tables: RawPlace,
        /// Blocks.
        count: u64,
        /// Entries of all tables.
        entries: u64,
        /// Heads of keys and of values.
        heads: u64,
        /// Numbers of a head.
        head_size: u64,
        /// GGML's number of the type.
        quant: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Keep`].
    struct RawKeep = spanker_work_keep {
        /// The head.
        head: RawWork,
        /// Rows of keys.
        keys: RawPlace,
        /// Rows of values.
        values: RawPlace,
        /// Where they go.
        cache: RawKvCache,
        /// Rows.
        rows: u64,
    }
    /// See [`crate::Work::AttendBlocks`].
    struct RawAttendBlocks = spanker_work_attend_blocks {
        /// The head.
        head: RawWork,
        /// Rows of queries.
        queries: RawPlace,
        /// The result.
        into: RawPlace,
        /// Keys and values.
        cache: RawKvCache,
        /// Rows of queries.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Heads of queries to one of keys and values.
        group: u64,
        /// What is added to the number of a head of queries before it is divided by the group.
        offset: u64,
        /// The bits of an f32.
        scale: u32,
        /// 0.
        reserved: u32,
    }
    /// A pick.
    struct RawPick = spanker_pick {
        /// The expert.
        expert: u32,
        /// The bits of an f32.
        weight: u32,
    }
    /// See [`spanker_plan::Picks`].
    struct RawPicks = spanker_picks {
        /// The picks.
        at: RawPlace,
        /// Picks of a row.
        used: u64,
        /// Experts that there are.
        experts: u64,
    }
    /// See [`crate::Work::Route`].
    struct RawRoute = spanker_work_route {
        /// The head.
        head: RawWork,
        /// Rows of logits.
        logits: RawPlace,
        /// Where the picks go.
        picks: RawPicks,
        /// Rows.
        rows: u64,
        /// `SPANKER_GATING_*`.
        gating: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::MatmulExperts`].
    struct RawMatmulExperts = spanker_work_matmul_experts {
        /// The head.
        head: RawWork,
        /// The rows of a.
        a: RawPlace,
        /// The first expert's b.
        b: RawPlace,
        /// The products.
        out: RawPlace,
        /// The picks.
        picks: RawPicks,
        /// Rows.
        m: u64,
        /// Columns of both.
        k: u64,
        /// Rows of an expert's b.
        n: u64,
        /// Bytes from an expert's b to the next one's.
        stride: u64,
        /// GGML's number of a's type.
        a_type: u32,
        /// GGML's number of b's type.
        b_type: u32,
        /// Whether a has a row for each pick.
        apart: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Combine`].
    struct RawCombine = spanker_work_combine {
        /// The head.
        head: RawWork,
        /// A row for each pick.
        from: RawPlace,
        /// The picks.
        picks: RawPicks,
        /// A row for each row.
        into: RawPlace,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// Whether sums are added to what is there.
        add: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::AddPicked`].
    struct RawAddPicked = spanker_work_add_picked {
        /// The head.
        head: RawWork,
        /// A row for each pick, or for each row.
        into: RawPlace,
        /// The first expert's row.
        table: RawPlace,
        /// The picks.
        picks: RawPicks,
        /// Rows.
        rows: u64,
        /// Numbers of a row.
        width: u64,
        /// Bytes from an expert's row to the next one's.
        stride: u64,
        /// Whether rows are weighed and added to one for each row.
        weighed: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::Scale`].
    struct RawScale = spanker_work_scale {
        /// The head.
        head: RawWork,
        /// The numbers.
        data: RawPlace,
        /// How many.
        elements: u64,
        /// The bits of an f32.
        factor: u32,
        /// The bits of an f32, or 0.
        cap: u32,
    }
    /// See [`crate::Work::Gate`].
    struct RawActivate = spanker_work_activate {
        /// The head.
        head: RawWork,
        /// What opens.
        gate: RawPlace,
        /// What passes.
        up: RawPlace,
        /// The result.
        into: RawPlace,
        /// How many.
        elements: u64,
        /// `SPANKER_ACTIVATION_*`.
        activation: u32,
        /// 0.
        reserved: u32,
    }
    /// See [`crate::Work::AttendBlocks`].
    struct RawAttendScores = spanker_work_attend_scores {
        /// The head.
        head: RawWork,
        /// Rows of queries.
        queries: RawPlace,
        /// The result.
        into: RawPlace,
        /// Keys and values.
        cache: RawKvCache,
        /// Rows of queries.
        rows: u64,
        /// Heads of a row.
        heads: u64,
        /// Heads of queries to one of keys and values.
        group: u64,
        /// What is added to the number of a head of queries before it is divided by the group.
        offset: u64,
        /// The bits of an f32.
        scale: u32,
        /// The bits of an f32, or 0.
        cap: u32,
        /// Positions that a row sees, or 0.
        window: u64,
        /// A score for each head, if there are sinks.
        sinks: RawPlace,
        /// 1: there are sinks.
        has_sinks: u32,
        /// 0.
        reserved: u32,
    }
}
