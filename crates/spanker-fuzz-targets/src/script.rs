// SPDX-License-Identifier: Apache-2.0
//! Bytes as a script: whoever runs it takes numbers off the front, and zeros when it has ended.

/// What is left of a script.
pub struct Script<'a> {
    pub left: &'a [u8],
}

impl<'a> Script<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Script { left: bytes }
    }

    /// At most so many bytes.
    pub fn take(&mut self, most: usize) -> &'a [u8] {
        let (front, left) = self.left.split_at(most.min(self.left.len()));
        self.left = left;
        front
    }

    fn number<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let front = self.take(N);
        bytes[..front.len()].copy_from_slice(front);
        bytes
    }

    pub fn byte(&mut self) -> u8 {
        u8::from_le_bytes(self.number())
    }

    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.number())
    }

    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.number())
    }

    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.number())
    }
}
