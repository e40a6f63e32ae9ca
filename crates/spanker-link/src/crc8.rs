// SPDX-License-Identifier: Apache-2.0
//! The header's own check: CRC-8 with the polynomial x^8 + x^2 + x + 1, most significant bit first.
//!
//! It finds every error of up to three bits in messages of up to 119 bits (Hamming distance 4); a
//! header has 80 with its session and this check.

const POLYNOMIAL: u8 = 0x07;
// Not zero, so that a run of zero bytes does not check.
const START: u8 = 0xFF;

const TABLE: [u8; 256] = {
    let mut table = [0; 256];
    let mut value = 0;
    while value < 256 {
        let mut rest = value as u8;
        let mut bit = 0;
        while bit < 8 {
            rest = if rest & 0x80 == 0 { rest << 1 } else { (rest << 1) ^ POLYNOMIAL };
            bit += 1;
        }
        table[value] = rest;
        value += 1;
    }
    table
};

/// The check of these bytes.
#[must_use]
pub fn crc8(bytes: &[u8]) -> u8 {
    bytes.iter().fold(START, |rest, byte| TABLE[usize::from(rest ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc8_by_table_is_the_division_bit_by_bit() {
        let mut rest: u8 = START;
        for byte in *b"123456789" {
            rest ^= byte;
            for _ in 0..8 {
                rest = if rest & 0x80 == 0 { rest << 1 } else { (rest << 1) ^ 7 };
            }
        }
        assert_eq!((crc8(b"123456789"), rest), (0xFB, 0xFB));
    }

    #[test]
    fn crc8_of_a_header_finds_every_error_of_up_to_three_bits() {
        // The check is linear, so it is enough that no pattern of one to three bits in ten bytes
        // has the syndrome 0.
        let syndromes: Vec<u8> = (0..80)
            .map(|bit| {
                let mut message = [0u8; 10];
                message[bit / 8] = 0x80 >> (bit % 8);
                let zero = crc8(&[0; 9]);
                crc8(&message[..9]) ^ zero ^ message[9]
            })
            .collect();
        for a in 0..80 {
            assert_ne!(syndromes[a], 0);
            for b in 0..a {
                assert_ne!(syndromes[a] ^ syndromes[b], 0);
                assert!((0..b).all(|c| syndromes[a] ^ syndromes[b] ^ syndromes[c] != 0));
            }
        }
    }
}
