/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ABI of a Spanker card, shared by the driver, by emulated cards and by every
 * program that opens one. It holds numbers and layouts only: what a request means
 * to the card is documented at each request, and no function is declared here.
 *
 * The same requests travel in two ways: as ioctls on a character device, and as
 * messages on a Unix stream socket (see struct spanker_message). Fields have fixed
 * widths and no implicit padding, so that 32-bit and 64-bit programs see the same
 * bytes; numbers are little-endian on the socket. Reserved fields are 0.
 *
 * A request that moves bytes names them by `address` and `length`, its first two
 * fields. On a character device the address is the caller's memory. On a socket it
 * is 0 and the bytes follow the argument as the payload of the message.
 */
#ifndef SPANKER_IOCTL_H
#define SPANKER_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The type byte that every request of this ABI carries. */
#define SPANKER_IOC_MAGIC 0xE3

/* The version that this header describes; a card answers with its own.
 *
 * A minor version adds requests, kinds of work and types (SPANKER_SINCE_* below) and
 * changes nothing else: a card does everything up to its own minor version, and a program
 * asks it for no more. A card answers ENOTTY to a request that it does not know.
 *
 * Another major version is refused by either side, on a socket with EPROTONOSUPPORT. PING
 * and GET_VERSION are answered all the same: their numbers and layouts, and the head of a
 * message, are those of every major version. */
#define SPANKER_ABI_VERSION_MAJOR 0
#define SPANKER_ABI_VERSION_MINOR 5
#define SPANKER_ABI_VERSION_PATCH 0

/* The minor version since which a card has a request or a kind of work. What is not listed
 * is in every version. A card without PORT_INFO has no links that anyone can know of. */
#define SPANKER_SINCE_CARD_INFO 2
#define SPANKER_SINCE_PORT_INFO 2
#define SPANKER_SINCE_ALLOCATE 2
#define SPANKER_SINCE_FREE 2
#define SPANKER_SINCE_WRITE 2
#define SPANKER_SINCE_READ 2
#define SPANKER_SINCE_SUBMIT 2
#define SPANKER_SINCE_WAIT 2
#define SPANKER_SINCE_COUNTERS 2
#define SPANKER_SINCE_RESET 2
#define SPANKER_SINCE_STATE 2
#define SPANKER_SINCE_RECORDS 2
#define SPANKER_SINCE_WORK_COPY 2
#define SPANKER_SINCE_WORK_FILL 2
#define SPANKER_SINCE_WORK_REDUCE 2
#define SPANKER_SINCE_WORK_MATMUL 2 /* Of Q4_K by Q4_K. */
#define SPANKER_SINCE_WORK_SEND 2
#define SPANKER_SINCE_WORK_RECEIVE 2
#define SPANKER_SINCE_WORK_FENCE 2
#define SPANKER_SINCE_WORK_EMBED 3
#define SPANKER_SINCE_WORK_NORM 3
#define SPANKER_SINCE_WORK_QUANTIZE 3
#define SPANKER_SINCE_WORK_ROTATE 3
#define SPANKER_SINCE_WORK_HALVE 3
#define SPANKER_SINCE_WORK_ATTEND 3
#define SPANKER_SINCE_WORK_GATE 3
#define SPANKER_SINCE_WORK_ROWS 3
#define SPANKER_SINCE_WORK_BEST 3
#define SPANKER_SINCE_MATMUL_TYPES 3 /* Products of the other types. */
#define SPANKER_SINCE_WORK_WRITE 4
#define SPANKER_SINCE_WORK_ADD_ROW 4
#define SPANKER_SINCE_WORK_ROTATE_ROWS 4
#define SPANKER_SINCE_WORK_KEEP 4
#define SPANKER_SINCE_WORK_ATTEND_BLOCKS 4
#define SPANKER_SINCE_WORK_ROUTE 5
#define SPANKER_SINCE_WORK_MATMUL_EXPERTS 5
#define SPANKER_SINCE_WORK_COMBINE 5
#define SPANKER_SINCE_WORK_SCALE 5
#define SPANKER_SINCE_WORK_ACTIVATE 5
#define SPANKER_SINCE_WORK_ATTEND_SCORES 5
#define SPANKER_SINCE_KV_Q4 5 /* Keys and values as Q4_0. */
#define SPANKER_SINCE_WORK_ADD_PICKED 5

/* The answer to SPANKER_IOC_GET_VERSION: 8 bytes. */
struct spanker_version {
	__u16 major;
	__u16 minor;
	__u16 patch;
	__u16 reserved;
};

/* Flags of a card. */
#define SPANKER_CARD_EMULATED 1u  /* A program plays the card. */
#define SPANKER_CARD_PACE_WALL 2u /* It holds itself back to its profile's speed. */
#define SPANKER_CARD_UNSHAPED 4u  /* It has no profile's speed; card time is wall time. */

/* What a card is. */
struct spanker_card_info {
	__u64 serial;       /* Unique among all cards. */
	__u64 capacity;     /* Bytes of memory for buffers. */
	__u64 available;    /* Of these, bytes in no buffer. */
	__u64 card_time_ps; /* The card's clock, in picoseconds. */
	__u32 index;        /* The number in the device's name. */
	__u32 ports;        /* Link ports. */
	__u32 flags;        /* SPANKER_CARD_*. */
	__u32 owner;        /* The process that has work on the card, or 0. */
	char profile[32];   /* The id of its profile, padded with NUL. */
};

/* States of a port: the hardware's link_state_t. */
#define SPANKER_PORT_DOWN 0u
#define SPANKER_PORT_TRAINING 1u
#define SPANKER_PORT_UP 2u
#define SPANKER_PORT_FAULT 3u

/* What a port is and what it is connected to. The caller sets `port`. */
struct spanker_port_info {
	__u32 port;
	__u32 state;       /* SPANKER_PORT_*. */
	__u32 lanes;       /* Lanes in use. */
	__u32 peer_port;   /* The port at the other end. */
	__u64 peer_serial; /* The card at the other end as learned in training, or 0. */
	__u64 bandwidth;   /* Payload bytes per second by the profile, or 0. */
	__u64 latency_ps;  /* One message by the profile. */
	__u32 shared;      /* 1: it sends on the same lanes as the card's other ports. */
	__u32 reserved;
};

/* Asks for a buffer of `length` bytes, filled with 0. Handles are never reused. */
struct spanker_allocate {
	__u64 length;
	__u64 buffer; /* Out: the handle, not 0. */
};

struct spanker_free {
	__u64 buffer;
};

/* Bytes of a buffer from or to the host. */
struct spanker_access {
	__u64 address;
	__u64 length;
	__u64 buffer;
	__u64 offset;
};

/* Work: `length` bytes of descriptors at `address`. Work of one job on several cards
 * belongs together: the ports match messages within a job only. */
struct spanker_submit {
	__u64 address;
	__u64 length;
	__u64 job;    /* The caller's number for it, not 0. */
	__u64 ticket; /* Out: what to wait for. Tickets count up. */
};

/* Kinds of faults. */
#define SPANKER_FAULT_NONE 0u
#define SPANKER_FAULT_CARD_LOST 1u /* The card is gone. */
#define SPANKER_FAULT_LINK_DOWN 2u /* The link between `card` and `peer` is. */
#define SPANKER_FAULT_STUCK 3u     /* The card answers nobody, or does not go on. */
#define SPANKER_FAULT_SLOW 4u      /* The card takes longer than it may. */
#define SPANKER_FAULT_WRONG 5u     /* The card computes or answers nonsense. */
#define SPANKER_FAULT_MISMATCH 6u  /* The card sent another message than was expected. */
#define SPANKER_FAULT_ABORTED 7u   /* The program gave the job up, or went away. */

/* Why a job failed. Every card of the job reports the same fault. */
struct spanker_fault {
	__u32 kind; /* SPANKER_FAULT_*. */
	__u32 reserved;
	__u64 card; /* The culprit's serial. */
	__u64 peer; /* For a link, the serial at its other end. */
	__u64 job;
};

/* Waits until the work of a ticket is complete, failed, or `timeout_ns` have passed.
 * A card knows the tickets of the caller that wait, and the last ones that ended. */
struct spanker_wait {
	__u64 ticket;
	__u64 timeout_ns;
	__u64 completed;    /* Out: the last ticket whose work is complete. */
	__u64 card_time_ps; /* Out: when the work of `ticket` was complete. */
	struct spanker_fault fault; /* Out: why `ticket` will not be complete. */
};

/* What the card has done since it was switched on. */
struct spanker_counters {
	__u64 work;            /* Descriptors completed. */
	__u64 memory_bytes;    /* Read and written in local memory by work. */
	__u64 multiplications; /* Multiply-accumulates. */
	__u64 host_in;         /* Bytes written by hosts. */
	__u64 host_out;        /* Bytes read by hosts. */
	__u64 sent;            /* Payload bytes sent to other cards. */
	__u64 received;        /* Payload bytes received from other cards. */
	__u64 frames_sent;
	__u64 frames_received;
	__u64 frames_replayed;
	__u64 frames_corrupt;
	__u64 retrainings;
	__u64 busy_ps;         /* Card time in work and in sending. */
	__u64 waiting_ps;      /* Card time in waiting for other cards. */
	__u64 faults;          /* Jobs that failed. */
	__u64 reserved;
};

/* Gives up a job: its work fails with `fault`, its messages are dropped. Job 0 stands
 * for all jobs of this program on this card. */
struct spanker_reset {
	__u64 job;
	struct spanker_fault fault;
};

/* What a card is doing. */
#define SPANKER_ACTIVITY_IDLE 0u
#define SPANKER_ACTIVITY_WORKING 1u
#define SPANKER_ACTIVITY_SENDING 2u   /* The peer at `port` takes no more. */
#define SPANKER_ACTIVITY_RECEIVING 3u /* Nothing comes from the peer at `port`. */

struct spanker_state {
	__u32 activity; /* SPANKER_ACTIVITY_*. */
	__u32 port;
	__u64 peer;      /* The serial of the card that is waited for, or 0. */
	__u64 job;       /* The job at work, or 0. */
	__u64 submitted; /* The last ticket given out. */
	__u64 completed; /* The last ticket whose work is complete. */
	__u64 progress;  /* Changes whenever the card gets on with its work. */
	__u64 card_time_ps;
};

/* Entries of the flight recorder. */
#define SPANKER_RECORD_SUBMITTED 1u /* a: ticket, b: descriptors. */
#define SPANKER_RECORD_STARTED 2u   /* a: ticket, b: kind of descriptor. */
#define SPANKER_RECORD_DONE 3u      /* a: ticket, b: kind of descriptor. */
#define SPANKER_RECORD_COMPLETE 4u  /* a: ticket. */
#define SPANKER_RECORD_LINK 5u      /* port; a: new state, b: peer. */
#define SPANKER_RECORD_FAULT 6u     /* a: culprit, b: kind. */
#define SPANKER_RECORD_NOTICE 7u    /* port; a: culprit, b: kind. */
#define SPANKER_RECORD_RESET 8u     /* a: job. */
#define SPANKER_RECORD_CLIENT 9u    /* a: process, b: 1 came, 0 went. */

struct spanker_record {
	__u64 sequence; /* Counts up from 1; gaps were overwritten. */
	__u64 wall_ns;  /* The host's monotonic clock, or virtual time. */
	__u64 card_time_ps;
	__u32 kind; /* SPANKER_RECORD_*. */
	__u32 port;
	__u64 a;
	__u64 b;
};

/* Reads the flight recorder into `length` bytes of struct spanker_record, from the first
 * that is there and not older than `first`. */
struct spanker_records {
	__u64 address;
	__u64 length;
	__u64 first;
	__u64 count; /* Out: records read. */
};

/* Returns 0 when the card is alive. It carries no data. */
#define SPANKER_IOC_PING _IO(SPANKER_IOC_MAGIC, 1)
#define SPANKER_IOC_GET_VERSION _IOR(SPANKER_IOC_MAGIC, 2, struct spanker_version)
#define SPANKER_IOC_CARD_INFO _IOR(SPANKER_IOC_MAGIC, 3, struct spanker_card_info)
#define SPANKER_IOC_PORT_INFO _IOWR(SPANKER_IOC_MAGIC, 4, struct spanker_port_info)
#define SPANKER_IOC_ALLOCATE _IOWR(SPANKER_IOC_MAGIC, 5, struct spanker_allocate)
#define SPANKER_IOC_FREE _IOW(SPANKER_IOC_MAGIC, 6, struct spanker_free)
#define SPANKER_IOC_WRITE _IOW(SPANKER_IOC_MAGIC, 7, struct spanker_access)
#define SPANKER_IOC_READ _IOW(SPANKER_IOC_MAGIC, 8, struct spanker_access)
#define SPANKER_IOC_SUBMIT _IOWR(SPANKER_IOC_MAGIC, 9, struct spanker_submit)
#define SPANKER_IOC_WAIT _IOWR(SPANKER_IOC_MAGIC, 10, struct spanker_wait)
#define SPANKER_IOC_COUNTERS _IOR(SPANKER_IOC_MAGIC, 11, struct spanker_counters)
#define SPANKER_IOC_RESET _IOW(SPANKER_IOC_MAGIC, 12, struct spanker_reset)
#define SPANKER_IOC_STATE _IOR(SPANKER_IOC_MAGIC, 13, struct spanker_state)
#define SPANKER_IOC_RECORDS _IOWR(SPANKER_IOC_MAGIC, 14, struct spanker_records)

/*
 * Descriptors. A ring of work is descriptors end to end. Each begins with its size, so
 * that a card skips nothing it does not know: an unknown kind or version, a size that
 * does not fit the kind, or a place outside a buffer of the caller refuses the whole
 * submission, and nothing of it runs.
 *
 * Descriptors start in order. All are complete before the next one starts, except sends
 * and receives: they run beside what follows, until a fence, which waits for everything
 * before it. A descriptor whose `after` is not 0 also waits for the send or receive at
 * that place of the submission, counted from 1.
 *
 * Numbers in buffers are little-endian. Places of f32, and of ids, are multiples of 4,
 * those of f16 of 2; blocks may begin anywhere. A result does not overlap an operand
 * unless that is said; then both begin at the same place. Rows of numbers have at most
 * 2^20 of them, and heads times positions of attention are at most 2^26.
 *
 * What a descriptor takes on the card's clock: the longer of its memory traffic and its
 * multiply-accumulates by the card's profile. Copies, fills, writes, reductions, sums with
 * a row, norms, products and attention also take the fixed time of an operator, products that follow each other
 * with the same `a` once for all of them. The traffic is each operand and each result
 * once, for attention keys and values alone, for rows of a table all rows asked for. Where
 * products follow each other with the same `a`, it counts for the first of them. Attention
 * over blocks reads each position of a sequence once: rows that follow each other and have
 * the same block table are of one sequence.
 */
#define SPANKER_WORK_COPY 1u
#define SPANKER_WORK_FILL 2u
#define SPANKER_WORK_REDUCE 3u
#define SPANKER_WORK_MATMUL 4u
#define SPANKER_WORK_SEND 5u
#define SPANKER_WORK_RECEIVE 6u
#define SPANKER_WORK_FENCE 7u
#define SPANKER_WORK_EMBED 8u
#define SPANKER_WORK_NORM 9u
#define SPANKER_WORK_QUANTIZE 10u
#define SPANKER_WORK_ROTATE 11u
#define SPANKER_WORK_HALVE 12u
#define SPANKER_WORK_ATTEND 13u
#define SPANKER_WORK_GATE 14u
#define SPANKER_WORK_ROWS 15u
#define SPANKER_WORK_BEST 16u
#define SPANKER_WORK_WRITE 17u
#define SPANKER_WORK_ADD_ROW 18u
#define SPANKER_WORK_ROTATE_ROWS 19u
#define SPANKER_WORK_KEEP 20u
#define SPANKER_WORK_ATTEND_BLOCKS 21u
#define SPANKER_WORK_ROUTE 22u
#define SPANKER_WORK_MATMUL_EXPERTS 23u
#define SPANKER_WORK_COMBINE 24u
#define SPANKER_WORK_SCALE 25u
#define SPANKER_WORK_ACTIVATE 26u
#define SPANKER_WORK_ATTEND_SCORES 27u
#define SPANKER_WORK_ADD_PICKED 28u

#define SPANKER_WORK_VERSION 1u

struct spanker_work {
	__u32 size; /* Bytes of the whole descriptor, a multiple of 8. */
	__u16 kind; /* SPANKER_WORK_*. */
	__u16 version;
	__u32 after;
	__u32 reserved;
};

struct spanker_place {
	__u64 buffer;
	__u64 offset;
};

struct spanker_work_copy {
	struct spanker_work head;
	struct spanker_place from;
	struct spanker_place into; /* Does not overlap `from`. */
	__u64 length;
};

struct spanker_work_fill {
	struct spanker_work head;
	struct spanker_place into;
	__u64 length;  /* A multiple of 4. */
	__u32 pattern; /* Repeated. */
	__u32 reserved;
};

/* Element types of reductions. */
#define SPANKER_TYPE_F32 0u
#define SPANKER_TYPE_F64 1u
#define SPANKER_TYPE_F16 2u
#define SPANKER_TYPE_BF16 3u
#define SPANKER_TYPE_I32 4u
#define SPANKER_TYPE_I64 5u
#define SPANKER_TYPE_U8 6u
#define SPANKER_TYPE_U32 7u

/* Operations of reductions. */
#define SPANKER_OP_SUM 0u
#define SPANKER_OP_PRODUCT 1u
#define SPANKER_OP_MAX 2u
#define SPANKER_OP_MIN 3u
#define SPANKER_OP_LOGSUMEXP 4u
#define SPANKER_OP_OR 5u
#define SPANKER_OP_AND 6u
#define SPANKER_OP_XOR 7u

/* into = sources[0] op sources[1] op .., in that order, then divided by `divisor` unless
 * that is 0 or 1. `count` places follow; `into` may be one of them. */
struct spanker_work_reduce {
	struct spanker_work head;
	struct spanker_place into;
	__u64 elements;
	__u16 type; /* SPANKER_TYPE_*. */
	__u16 op;   /* SPANKER_OP_*. */
	__u32 divisor;
	__u32 count; /* 1 to 256. */
	__u32 reserved;
};

/* out (m x n, f32) = a (m rows of k) times the transpose of b (n rows of k). Types are
 * GGML's numbers. Every card knows Q4_K (12) for both, and since SPANKER_SINCE_MATMUL_TYPES
 * for b F32 (0), F16 (1), BF16 (30) with a of F32, Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7),
 * Q8_0 (8) with a of Q8_0, Q4_K (12), Q5_K (13), Q6_K (14) with a of Q8_K (15). */
struct spanker_work_matmul {
	struct spanker_work head;
	struct spanker_place a;
	struct spanker_place b;
	struct spanker_place out;
	__u64 m;
	__u64 k;
	__u64 n;
	__u32 a_type;
	__u32 b_type;
};

struct spanker_work_send {
	struct spanker_work head;
	struct spanker_place from;
	__u64 length;
	__u32 port;
	__u32 tag; /* The receiver's must be equal. */
};

/* What a receive does with the elements that come. */
#define SPANKER_RECEIVE_STORE 0u
#define SPANKER_RECEIVE_FOLD_FIRST 1u  /* local = incoming op local. */
#define SPANKER_RECEIVE_FOLD_SECOND 2u /* local = local op incoming. */

struct spanker_work_receive {
	struct spanker_work head;
	struct spanker_place into;
	__u64 length;
	__u32 port;
	__u32 tag;
	__u16 mode; /* SPANKER_RECEIVE_*. */
	__u16 type; /* For a fold. */
	__u16 op;   /* For a fold. */
	__u16 reserved;
};

/* Waits for everything before it, and for the card's clock. */
struct spanker_work_fence {
	struct spanker_work head;
	__u64 not_before_ps; /* 0: no clock. At most 2^63. */
};

/* Rows of a table of weights as f32. For each of `rows` ids (u32): if it is from `first` to
 * `first + count - 1`, that row of `table` is decoded to the same row of `into`. Rows of
 * other ids are left alone. */
struct spanker_work_embed {
	struct spanker_work head;
	struct spanker_place table; /* `count` rows of `width` numbers. */
	struct spanker_place ids;
	struct spanker_place into;
	__u64 rows;
	__u64 width;
	__u32 quant; /* GGML's number of the table's type. */
	__u32 first;
	__u32 count;
	__u32 reserved;
};

/* into = from / sqrt(mean(from^2) + epsilon) * weight, for each row. `into` may be `from`. */
struct spanker_work_norm {
	struct spanker_work head;
	struct spanker_place from;
	struct spanker_place weight; /* One row. */
	struct spanker_place into;
	__u64 rows;
	__u64 width;
	__u32 epsilon; /* The bits of an f32. */
	__u32 reserved;
};

/* Rows of f32 as what weights are multiplied with. */
struct spanker_work_quantize {
	struct spanker_work head;
	struct spanker_place from;
	struct spanker_place into;
	__u64 rows;
	__u64 width; /* Whole blocks. */
	__u32 quant; /* Q8_0 (8), Q8_K (15) or F32 (0). */
	__u32 reserved;
};

/* How the numbers of a head pair up. */
#define SPANKER_PAIRS_ADJACENT 0u /* 0 and 1, 2 and 3. */
#define SPANKER_PAIRS_HALVES 1u   /* 0 and dims/2, 1 and dims/2 + 1. */

/* Turns the first `dims` numbers of every head, in place. Row i of `data` (heads times
 * head_size f32) uses row i of `table` (dims f32): cosine and sine for each pair. */
struct spanker_work_rotate {
	struct spanker_work head;
	struct spanker_place data;
	struct spanker_place table;
	__u64 rows;
	__u64 heads;
	__u64 head_size;
	__u64 dims;  /* Even, at most head_size. */
	__u32 pairs; /* SPANKER_PAIRS_*. */
	__u32 reserved;
};

/* f32 as f16, to the nearest, ties to even. */
struct spanker_work_halve {
	struct spanker_work head;
	struct spanker_place from;
	struct spanker_place into;
	__u64 elements;
};

/* Attention. Queries and the result are `rows` rows of heads times head_size f32. Keys and
 * values are f16, a row of kv_heads times head_size for each of past + rows positions.
 * Row i sees positions 0 to past + i. Head h uses head (offset + h) / group of keys and
 * values. `into` may be `queries`. */
struct spanker_work_attend {
	struct spanker_work head;
	struct spanker_place queries;
	struct spanker_place keys;
	struct spanker_place values;
	struct spanker_place into;
	__u64 rows;
	__u64 heads;
	__u64 kv_heads;
	__u64 head_size;
	__u64 group; /* Not 0. */
	__u64 offset;
	__u64 past;
	__u32 scale; /* The bits of an f32; products are multiplied with it. */
	__u32 reserved;
};

/* into = gate / (1 + exp(-gate)) * up, of f32. `into` may be `gate` or `up`. */
struct spanker_work_gate {
	struct spanker_work head;
	struct spanker_place gate;
	struct spanker_place up;
	struct spanker_place into;
	__u64 elements;
};

/* Copies `rows` blocks of `length` bytes. From the first byte to the last, source and
 * destination do not overlap. */
struct spanker_work_rows {
	struct spanker_work head;
	struct spanker_place from;
	struct spanker_place into;
	__u64 rows;
	__u64 length;
	__u64 from_stride; /* At least `length`. */
	__u64 into_stride; /* At least `length`. */
};

/* The `k` largest of `count` f32, the largest first and the lowest place among equals; what
 * is not a number comes last. Each is a u32, its place plus `first`, and its f32. Where
 * there are fewer, the rest is place 0xFFFFFFFF with minus infinity. */
struct spanker_work_best {
	struct spanker_work head;
	struct spanker_place from;
	struct spanker_place into; /* 8 bytes for each. */
	__u64 count;
	__u32 k; /* 1 to 4096. */
	__u32 first;
};

/* Stores the `length` bytes that follow, filled up with 0 to a multiple of 8. */
struct spanker_work_write {
	struct spanker_work head;
	struct spanker_place into;
	__u64 length; /* A multiple of 4, at most 2^20. */
};

/* Adds `row` (width f32) to each of `rows` rows. */
struct spanker_work_add_row {
	struct spanker_work head;
	struct spanker_place into;
	struct spanker_place row;
	__u64 rows;
	__u64 width;
};

/* Where a row of a step lies in its sequence. */
struct spanker_row {
	__u32 position;
	__u32 table; /* The first entry of its block table. */
};

/* Like spanker_work_rotate, by rows of the table that `at` (a struct spanker_row for each
 * row) names by its position. Rows of positions beyond the table are left alone. */
struct spanker_work_rotate_rows {
	struct spanker_work head;
	struct spanker_place data;
	struct spanker_place table; /* `positions` rows of dims f32. */
	struct spanker_place at;
	__u64 positions;
	__u64 rows;
	__u64 heads;
	__u64 head_size;
	__u64 dims;  /* Even, at most head_size. */
	__u32 pairs; /* SPANKER_PAIRS_*. */
	__u32 reserved;
};

/* Keys and values of one layer in blocks of 64 positions, which begin at `blocks` and lie end
 * to end. Position p of a row is in the block whose number is entry `table + p / 64` of
 * `tables`.
 *
 * A block has, head by head, the keys of 64 positions and then their values. As F16 (1) keys
 * are head_size times 64 numbers: number d of slot s at 64 d + s; values 64 times head_size:
 * number d of slot s at head_size s + d. As Q8_0 (8) the same as whole numbers of a byte, and
 * behind them f16 scales, one for each 32 numbers of a slot: keys head_size / 32 times 64,
 * values 64 times head_size / 32. As Q4_0 (2) the same with two whole numbers from 0 to 15 in a byte,
 * of which 8 is 0: of the 32 of a scale, byte i has number i in its lower half and i + 16 in its upper. */
struct spanker_kv_cache {
	struct spanker_place blocks;
	struct spanker_place rows;   /* A struct spanker_row for each row. */
	struct spanker_place tables; /* `entries` numbers of blocks (u32). */
	__u64 count;     /* Blocks. */
	__u64 entries;
	__u64 heads;     /* Of keys and of values. */
	__u64 head_size; /* A multiple of 32 for Q8_0 and Q4_0. */
	__u32 quant;     /* F16 (1), Q8_0 (8) or Q4_0 (2). */
	__u32 reserved;
};

/* Rounds keys and values of rows (heads times head_size f32 each) into the cache. Rows whose
 * block is not there are left out. */
struct spanker_work_keep {
	struct spanker_work head;
	struct spanker_place keys;
	struct spanker_place values;
	struct spanker_kv_cache cache;
	__u64 rows;
};

/* Attention over a cache in blocks. Queries and the result are `rows` rows of heads times
 * head_size f32; a row sees positions 0 to its own. Head h uses head (offset + h) / group of
 * keys and values. `into` may be `queries`. Rows of which a block is not there are left
 * alone. */
struct spanker_work_attend_blocks {
	struct spanker_work head;
	struct spanker_place queries;
	struct spanker_place into;
	struct spanker_kv_cache cache;
	__u64 rows;
	__u64 heads;
	__u64 group; /* Not 0. */
	__u64 offset;
	__u32 scale; /* The bits of an f32; products are multiplied with it. */
	__u32 reserved;
};

/* Which experts of a mixture rows meet: for each row `used` picks, in the order of their logits,
 * the largest first and among equals the lowest number first. */
struct spanker_pick {
	__u32 expert;
	__u32 weight; /* The bits of an f32. */
};

struct spanker_picks {
	struct spanker_place at; /* A struct spanker_pick for each pick. */
	__u64 used;              /* Picks of a row: 1 to `experts`. */
	__u64 experts;           /* Experts that there are, at most 1024. */
};

/* How picks are weighed, by e^(logit - largest logit) of an expert, e(i). */
#define SPANKER_GATING_SOFTMAX 0u           /* e(i) / sum of e of all experts in rising order. */
#define SPANKER_GATING_SOFTMAX_NORMED 1u    /* That / its sum over the picks in their order. */
#define SPANKER_GATING_SOFTMAX_OF_CHOSEN 2u /* e(i) / sum of e of the picks in their order. */
#define SPANKER_GATING_SIGMOID 3u           /* 1 / (1 + e^(-logit)). */

/* Picks experts for rows of `experts` logits (f32). What is not a number comes last. */
struct spanker_work_route {
	struct spanker_work head;
	struct spanker_place logits;
	struct spanker_picks picks;
	__u64 rows;
	__u32 gating; /* SPANKER_GATING_*. */
	__u32 reserved;
};

/* Products with the experts that `m` rows have picked: for each pick a row of `n` f32. `a` has a
 * row of `k` for each row or, where `apart` is 1, for each pick; an expert's b has `n` rows, and
 * begins `stride` bytes behind the one before. Types are those of MATMUL. Results of experts
 * that are not there are left alone. */
struct spanker_work_matmul_experts {
	struct spanker_work head;
	struct spanker_place a;
	struct spanker_place b;
	struct spanker_place out;
	struct spanker_picks picks;
	__u64 m;
	__u64 k;
	__u64 n;
	__u64 stride;
	__u32 a_type;
	__u32 b_type;
	__u32 apart; /* 0 or 1. */
	__u32 reserved;
};

/* Sums of rows of `width` f32, each times its pick's weight, in the order of the picks; where
 * `add` is 1, added to what is there. */
struct spanker_work_combine {
	struct spanker_work head;
	struct spanker_place from; /* A row for each pick. */
	struct spanker_picks picks;
	struct spanker_place into; /* A row for each row. */
	__u64 rows;
	__u64 width;
	__u32 add; /* 0 or 1. */
	__u32 reserved;
};

/* Adds the row of f32 that belongs to the expert of each pick: to the pick's row, or, if `weighed` is 1, times
 * its weight to the row's, in the order of the picks. Experts that are not there add nothing. */
struct spanker_work_add_picked {
	struct spanker_work head;
	struct spanker_place into;  /* A row for each pick, or for each row. */
	struct spanker_place table; /* The first expert's row. */
	struct spanker_picks picks;
	__u64 rows;
	__u64 width;
	__u64 stride;  /* Bytes from an expert's row to the next one's, a multiple of 4. */
	__u32 weighed; /* 0 or 1. */
	__u32 reserved;
};

/* f32 in place: x * factor, and then, if `cap` is not 0, cap * tanh(x / cap). */
struct spanker_work_scale {
	struct spanker_work head;
	struct spanker_place data;
	__u64 elements;
	__u32 factor; /* The bits of an f32. */
	__u32 cap;    /* The bits of an f32, or 0. */
};

/* Gates that are not SiLU. GELU is gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2 * up.
 * Clamped SiLU is g / (1 + exp(-1.702 g)) * (u + 1), where g is the smaller of gate and 7, and u is up from
 * -7 to 7. */
#define SPANKER_ACTIVATION_GELU 1u
#define SPANKER_ACTIVATION_CLAMPED_SILU 2u

/* As spanker_work_gate, by another function. */
struct spanker_work_activate {
	struct spanker_work head;
	struct spanker_place gate;
	struct spanker_place up;
	struct spanker_place into;
	__u64 elements;
	__u32 activation; /* SPANKER_ACTIVATION_*. */
	__u32 reserved;
};

/* As spanker_work_attend_blocks. A score, which is a product times `scale`, becomes
 * cap * tanh(score / cap) if `cap` is not 0. A row sees the last `window` positions up to its
 * own, or all if that is 0. With sinks, head h has one more score, the h-th f32 of `sinks`: its
 * weight counts, and it has no value. */
struct spanker_work_attend_scores {
	struct spanker_work head;
	struct spanker_place queries;
	struct spanker_place into;
	struct spanker_kv_cache cache;
	__u64 rows;
	__u64 heads;
	__u64 group; /* Not 0. */
	__u64 offset;
	__u32 scale; /* The bits of an f32. */
	__u32 cap;   /* The bits of an f32, or 0. */
	__u64 window;
	struct spanker_place sinks; /* Ignored without has_sinks. */
	__u32 has_sinks;            /* 0 or 1. */
	__u32 reserved;
};

/* The head of a message on a socket, request and answer alike. `argument` bytes of the
 * request's struct follow, then `payload` bytes. An answer repeats number and sequence. */
#define SPANKER_MESSAGE_MAGIC 0x524B5053u /* "SPKR" */
#define SPANKER_MESSAGE_MAX_PAYLOAD 16777216u

struct spanker_message {
	__u32 magic;
	__u16 major; /* The sender's ABI. */
	__u16 minor;
	__u32 number;   /* SPANKER_IOC_*. */
	__s32 status;   /* In an answer 0 or an errno. */
	__u64 sequence; /* Chosen by the caller. */
	__u32 argument; /* The size that the number encodes, in an answer or less. */
	__u32 payload;
};

#endif /* SPANKER_IOCTL_H */
