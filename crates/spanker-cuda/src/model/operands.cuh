// SPDX-License-Identifier: Apache-2.0
// Instructions and their operands. Made from the structs of operands.rs, which a test compares with this.

// Kinds of instructions.
enum Kind {
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
};

// What a kind may come with: no grid barrier follows, because the next instruction is of another card.
enum With {
    JOINED = 256,
};

// What becomes of a product's results: they are stored, added to what is there, or gate and up are combined.
enum Keep {
    STORE = 0,
    INTO = 1,
    GATED = 2,
};

// How the inputs of a streamed product are prepared: normed and rounded, or only rounded.
enum Ready {
    NORMED = 1,
    ROUNDED = 2,
};

// How words of several cards become one.
enum FoldOf {
    SUM_F32 = 0,
    OR_U32 = 1,
};

// What a streamed product polls dataflow slots for, as bits: its inputs, and what its results are added to.
enum Awaits {
    AWAITS_INPUT = 1,
    AWAITS_ADDED = 2,
};

// A matrix of a product: the type of its weights, and its rows.
struct Matrix {
    u32 quant;
    u32 rows;
};
static_assert(sizeof(Matrix) == 8, "as the host has it");

// Looks up the embeddings of tokens.
struct Embed {
    u32 kind;
    u32 rows;
    u32 width;
    u32 quant;
    // The first token of the table, and how many it has.
    u32 first;
    u32 count;
    // Whether a later instruction of the same kernel writes `into`.
    u32 is_overwritten;
    u32 unused_numbers[13];
    u64 table;
    u64 into;
    // The tokens, in the tables of the step.
    u64 ids;
    u64 unused[5];
    // The dataflow slot of the results, or 0.
    u64 slot;
    u64 unused_addresses[3];
};
static_assert(sizeof(Embed) == 176, "as the host has it");

// RMS norm of rows.
struct Norm {
    u32 kind;
    u32 rows;
    u32 width;
    u32 epsilon;
    u32 unused_numbers[16];
    u64 from;
    u64 weight;
    u64 into;
    u64 unused_addresses[9];
};
static_assert(sizeof(Norm) == 176, "as the host has it");

// Rounds rows to blocks of a type.
struct Quantize {
    u32 kind;
    u32 rows;
    u32 width;
    u32 quant;
    u32 unused_numbers[16];
    u64 from;
    u64 into;
    u64 unused_addresses[10];
};
static_assert(sizeof(Quantize) == 176, "as the host has it");

// A product of many rows of inputs.
struct Matmul {
    u32 kind;
    u32 rows;
    u32 width;
    // Rows of weights.
    u32 outs;
    u32 input_quant;
    u32 weight_quant;
    // Rows of weights of a tile, where tensor cores multiply.
    u32 tile_outs;
    u32 unused_numbers[13];
    u64 inputs;
    u64 weights;
    u64 out;
    // Inputs as tensor cores read them, or 0.
    u64 packed;
    u64 unused_addresses[8];
};
static_assert(sizeof(Matmul) == 176, "as the host has it");

// Rearranges blocks of inputs of a product for tensor cores.
struct Pack {
    u32 kind;
    u32 rows;
    u32 width;
    // Whether words of both halves of a block take turns: for weights of four bits.
    u32 is_interleaved;
    // Whether blocks are those of Q8_K.
    u32 is_long;
    u32 unused_numbers[15];
    u64 from;
    u64 into;
    u64 unused_addresses[10];
};
static_assert(sizeof(Pack) == 176, "as the host has it");

// Where a row of a step lies: its position, and the first entry of its block table.
struct RowAt {
    u32 position;
    u32 table;
};
static_assert(sizeof(RowAt) == 8, "as the host has it");

// Rotary embedding of heads, by the positions of their rows.
struct Rotate {
    u32 kind;
    u32 rows;
    u32 heads;
    u32 head_size;
    u32 dims;
    // Whether the two numbers of a pair are half of `dims` apart, and not neighbours.
    u32 pairs;
    // Positions of the table.
    u32 positions;
    u32 unused_numbers[13];
    u64 data;
    u64 table;
    // Where rows lie.
    u64 at;
    u64 unused_addresses[9];
};
static_assert(sizeof(Rotate) == 176, "as the host has it");

// Stores keys and values of rows in the blocks of their sequences.
struct KeepKv {
    u32 kind;
    u32 rows;
    u32 kv_heads;
    u32 head_size;
    // The type of the KV cache: F16 or Q8_0.
    u32 quant;
    u32 unused_numbers[15];
    u64 keys;
    u64 values;
    // The first block of the layer.
    u64 cache;
    // Where rows lie, and block tables.
    u64 at;
    u64 tables;
    u64 unused_addresses[7];
};
static_assert(sizeof(KeepKv) == 176, "as the host has it");

// Combines gate and up.
struct Gate {
    u32 kind;
    u32 elements;
    u32 unused_numbers[18];
    u64 gate;
    u64 up;
    u64 into;
    u64 unused_addresses[9];
};
static_assert(sizeof(Gate) == 176, "as the host has it");

// Adds `more` to `into`.
struct Add {
    u32 kind;
    u32 elements;
    u32 unused_numbers[18];
    u64 into;
    u64 more;
    u64 unused_addresses[10];
};
static_assert(sizeof(Add) == 176, "as the host has it");

// Adds one row to rows.
struct AddRow {
    u32 kind;
    u32 rows;
    u32 width;
    u32 unused_numbers[17];
    u64 into;
    u64 row;
    u64 unused_addresses[10];
};
static_assert(sizeof(AddRow) == 176, "as the host has it");

// Attention of rows of queries over the blocks of their sequences.
struct Attend {
    u32 kind;
    u32 rows;
    u32 heads;
    u32 kv_heads;
    u32 head_size;
    u32 group;
    u32 offset;
    u32 scale;
    // Whether the last key and value are new: they are rotated, and stored in the KV cache.
    u32 is_fresh;
    u32 dims;
    u32 pairs;
    // The type of blocks of results, or 0.
    u32 block_quant;
    // Positions whose values are in shared memory at a time: whole blocks.
    u32 near;
    // Whether queries, new keys and new values are polled for in dataflow slots.
    u32 is_awaiting;
    // The type of the KV cache: F16 or Q8_0.
    u32 quant;
    // Whether rows of a sequence may go through its blocks together.
    u32 is_tiled;
    u32 unused_numbers[4];
    u64 queries;
    // The first block of the layer.
    u64 cache;
    // Where rows lie, and block tables.
    u64 at;
    u64 tables;
    u64 into;
    // Of rotary embeddings.
    u64 table;
    u64 new_keys;
    u64 new_values;
    // Blocks of results.
    u64 blocks;
    // A second place for results, or 0.
    u64 store;
    u64 unused_addresses[2];
};
static_assert(sizeof(Attend) == 176, "as the host has it");

// Fills words with a pattern.
struct Fill {
    u32 kind;
    u32 words;
    u32 pattern;
    u32 unused_numbers[17];
    u64 into;
    u64 unused_addresses[11];
};
static_assert(sizeof(Fill) == 176, "as the host has it");

// Copies bytes, an even number of them.
struct CopyBytes {
    u32 kind;
    u32 bytes;
    u32 unused_numbers[18];
    u64 from;
    u64 into;
    u64 unused_addresses[10];
};
static_assert(sizeof(CopyBytes) == 176, "as the host has it");

// Gives parts of rows that some cards have to some cards, which then have them in whole rows.
struct Gather {
    u32 kind;
    u32 rows;
    // Bytes of a unit: 2, 4 or 16.
    u32 unit;
    // Units of a whole row.
    u32 width;
    // Cards that give, and cards that get.
    u32 givers;
    u32 getters;
    // Units of a row before each part, and of each part.
    u32 starts[6];
    u32 lengths[6];
    u32 unused_numbers[2];
    u64 from[6];
    u64 into[6];
};
static_assert(sizeof(Gather) == 176, "as the host has it");

// Folds words of cards in the order of their ranks, and gives the results to all of them.
struct FoldWords {
    u32 kind;
    u32 words;
    u32 fold;
    u32 cards;
    u32 unused_numbers[16];
    u64 data[12];
};
static_assert(sizeof(FoldWords) == 176, "as the host has it");

// Products of one row of inputs with up to three matrices.
struct Vector {
    u32 kind;
    u32 width;
    u32 input_quant;
    // Whether the inputs are normed first.
    u32 is_normed;
    u32 epsilon;
    u32 keep;
    u32 tile_rows;
    Matrix matrices[3];
    u32 unused;
    // Tiles of the first matrix, of the first two, and of all.
    u32 tile_ends[3];
    u32 unused_numbers[3];
    u64 input;
    u64 norm_weight;
    u64 weights[3];
    u64 outs[3];
    u64 unused_addresses[4];
};
static_assert(sizeof(Vector) == 176, "as the host has it");

// A `Vector` that keeps its results `GATED`: the products of gate and up, combined.
struct GatedVector {
    u32 kind;
    u32 width;
    u32 input_quant;
    u32 is_normed;
    u32 epsilon;
    u32 keep;
    u32 tile_rows;
    Matrix matrices[3];
    // The type of blocks of results, or 0.
    u32 block_quant;
    u32 tile_ends[3];
    u32 unused_numbers[3];
    u64 input;
    u64 norm_weight;
    u64 weights[3];
    u64 out;
    // How many results of each block are there.
    u64 counters;
    // Blocks of results.
    u64 blocks;
    u64 unused_addresses[4];
};
static_assert(sizeof(GatedVector) == 176, "as the host has it");

// Rounds rows of Q4_K to inputs of products.
struct RoundQ4K {
    u32 kind;
    u32 blocks;
    u32 unused_numbers[18];
    u64 from;
    u64 into;
    u64 unused_addresses[10];
};
static_assert(sizeof(RoundQ4K) == 176, "as the host has it");

// Products of one row of inputs with up to three matrices whose weights are prefetched.
struct Streamed {
    u32 kind;
    u32 width;
    u32 awaits;
    u32 ready;
    u32 epsilon;
    u32 keep;
    u32 unused;
    // Pairs of rows of the first matrix, and of the first two. A gated pair is a row of each of two matrices.
    u32 pair_ends[2];
    u32 rows[3];
    u32 unused_numbers[5];
    // Pairs of every block, and blocks that have one more.
    u32 block_pairs;
    u32 larger_blocks;
    // The index of the next such instruction and one, or 0.
    u32 next;
    u64 input;
    u64 norm_weight;
    u64 weights[3];
    u64 outs[3];
    // What results are added to.
    u64 added;
    // Second places for results, or 0.
    u64 stores[3];
};
static_assert(sizeof(Streamed) == 176, "as the host has it");

// What changes from step to step.
struct Step {
    // The counter of the grid barrier, and its value before the step.
    u64 *barrier;
    u64 arrived;
    // The first instruction whose weights are prefetched: its index and one, or 0.
    u32 streamed;
    // Where its ring of slots is in shared memory.
    u32 ring;
    // Dataflow slots of the next step, in parts of 16 bytes, which this step resets.
    uint4 *unwritten;
    u64 unwritten_parts;
    // When each instruction begins in the first block, and when the last one ends, in nanoseconds; or null.
    u64 *times;
};
static_assert(sizeof(Step) == 48, "as the host has it");

// An instruction: every struct of operands begins with its kind.
union Instruction {
    u32 kind;
    Embed embed;
    Norm norm;
    Quantize quantize;
    Matmul matmul;
    Pack pack;
    Rotate rotate;
    KeepKv keep_kv;
    Gate gate;
    Add add;
    AddRow add_row;
    Attend attend;
    Fill fill;
    CopyBytes copy_bytes;
    Gather gather;
    FoldWords fold_words;
    Vector vector;
    GatedVector gated_vector;
    RoundQ4K round_q4_k;
    Streamed streamed;
};
static_assert(sizeof(Instruction) == 176, "as the host has it");
