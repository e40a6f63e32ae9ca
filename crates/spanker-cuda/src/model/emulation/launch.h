// SPDX-License-Identifier: Apache-2.0
// How a host launches the emulated kernel: behind the kernel's source.

struct Arguments {
    const Instruction *program;
    u32 count;
    Step step;
};
static thread_local const Arguments *arguments;

// A fiber's whole life.
extern "C" void emulation_thread() {
    spanker_card(arguments->program, arguments->count, arguments->step);
    // Nobody may be waiting for this thread.
    block->done++;
    while (block->done < block->threads) give_way();
    void *nowhere;
    emulation_switch(&nowhere, block->home);
}

static std::mutex stacks_lock;
static std::vector<void *> stacks;

static void *stack() {
    std::lock_guard<std::mutex> lock(stacks_lock);
    if (stacks.empty()) return aligned_alloc(4096, STACK_BYTES);
    void *one = stacks.back();
    stacks.pop_back();
    return one;
}

static void run_block(const Arguments &of, u32 index, u32 blocks, bool backwards) {
    Block *own = new Block();
    block = own, arguments = &of;
    blockIdx.x = index, gridDim.x = blocks, threadIdx.x = 0;
    own->threads = THREADS, own->backwards = backwards;
    memset(shared, 0xff, sizeof shared);
    void *bottoms[THREADS];
    for (u32 i = 0; i < THREADS; i++) {
        bottoms[i] = stack();
        // Six registers, where it begins, and what it would return to.
        u64 *top = (u64 *)((u8 *)bottoms[i] + STACK_BYTES) - 8;
        memset(top, 0, 64);
        top[6] = (u64)(void *)emulation_thread;
        own->fibers[i].stack_pointer = top;
    }
    emulation_switch(&own->home, own->fibers[0].stack_pointer);
    {
        std::lock_guard<std::mutex> lock(stacks_lock);
        stacks.insert(stacks.end(), bottoms, bottoms + THREADS);
    }
    delete own;
}

// Runs a program on so many blocks to its end.
extern "C" void spanker_emulate(const Instruction *program, u32 count, const Step *step, u32 blocks, u32 backwards) {
    const Arguments of = {program, count, *step};
    std::vector<std::thread> threads;
    for (u32 index = 0; index < blocks; index++) threads.emplace_back([&, index] { run_block(of, index, blocks, backwards); });
    for (std::thread &thread : threads) thread.join();
}
