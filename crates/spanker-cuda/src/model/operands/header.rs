// SPDX-License-Identifier: Apache-2.0
//! The text of `operands.cuh` as the structs make it, and checks that the kernel's structs are the host's.

use std::fmt::Write;

use super::{Instruction, NUMBERS, STRUCTS, Step};

/// The header that the kernel is compiled with.
const HEADER: &str = include_str!("../operands.cuh");

/// A struct, as the header declares it.
pub(super) struct Struct {
    pub(super) name: &'static str,
    pub(super) notes: &'static [&'static str],
    pub(super) size: usize,
    pub(super) fields: &'static [Field],
}

/// A field of a struct.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) notes: &'static [&'static str],
    pub(super) rust: &'static str,
    /// Its type in C, where that is another than in Rust.
    pub(super) c: &'static str,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// Numbers that have names.
pub(super) struct Numbers {
    pub(super) name: &'static str,
    pub(super) notes: &'static [&'static str],
    pub(super) values: &'static [(&'static str, u32)],
}

/// The declaration of a field in C.
fn declared(field: &Field) -> String {
    let space = if field.c.ends_with('*') { "" } else { " " };
    match field.rust.strip_prefix('[').and_then(|array| array.strip_suffix(']')) {
        Some(array) => {
            let (element, count) = array.split_once(';').expect("an array has a length");
            format!("{} {}[{}];", element.trim(), field.name, count.trim())
        }
        None if field.c.is_empty() => format!("{} {};", field.rust, field.name),
        None => format!("{}{space}{};", field.c, field.name),
    }
}

/// The whole header.
fn header() -> String {
    let mut text = String::from(
        "// SPDX-License-Identifier: Apache-2.0\n\
         // Instructions and their operands. Made from the structs of operands.rs, which a test compares with this.\n",
    );
    let note = |text: &mut String, indent: &str, notes: &[&str]| {
        for line in notes {
            let _ = writeln!(text, "{indent}//{line}");
        }
    };
    for numbers in NUMBERS {
        text.push('\n');
        note(&mut text, "", numbers.notes);
        let values: Vec<String> =
            numbers.values.iter().map(|(name, value)| format!("    {name} = {value},\n")).collect();
        let _ = writeln!(text, "enum {} {{\n{}}};", numbers.name, values.concat());
    }
    for Struct { name, notes, size, fields } in STRUCTS {
        text.push('\n');
        note(&mut text, "", notes);
        let _ = writeln!(text, "struct {name} {{");
        for field in *fields {
            note(&mut text, "    ", field.notes);
            let _ = writeln!(text, "    {}", declared(field));
        }
        let _ =
            writeln!(text, "}};\nstatic_assert(sizeof({name}) == {size}, \"as the host has it\");");
    }
    text.push_str("\n// An instruction: every struct of operands begins with its kind.\nunion Instruction {\n    u32 kind;\n");
    for Struct { name, .. } in STRUCTS.iter().filter(|of| of.size == size_of::<Instruction>()) {
        let _ = writeln!(text, "    {name} {};", member(name));
    }
    let size = size_of::<Instruction>();
    let _ = writeln!(
        text,
        "}};\nstatic_assert(sizeof(Instruction) == {size}, \"as the host has it\");"
    );
    text
}

/// The member of the union that has a struct: its name in lower case.
fn member(name: &str) -> String {
    let mut member = String::new();
    for (at, character) in name.char_indices() {
        if character.is_uppercase() && at > 0 {
            member.push('_');
        }
        member.push(character.to_ascii_lowercase());
    }
    member
}

/// A field's name, offset and bytes.
type Laid = (String, usize, usize);

/// Every field of a struct of `text`, as a C compiler lays it out, and the struct's size.
fn layout(text: &str, name: &str) -> (Vec<Laid>, usize) {
    let body = text.split_once(&format!("struct {name} {{\n")).expect("the struct").1;
    let body = body.split_once("};").expect("its end").0;
    let (mut at, mut fields, mut most) = (0usize, Vec::new(), 1);
    for line in body.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        let line = line.strip_suffix(';').expect("a declaration");
        let split = line.rfind([' ', '*']).expect("a type and a name") + 1;
        let (kind, declarator) = (line[..split].trim(), &line[split..]);
        let (field, count) = match declarator.split_once('[') {
            Some((field, count)) => (field, count.trim_end_matches(']').parse().expect("a number")),
            None => (declarator, 1),
        };
        let (size, align) = match kind {
            "u32" => (4, 4),
            "Matrix" => (8, 4),
            kind if kind == "u64" || kind.ends_with('*') => (8, 8),
            other => panic!("{other} of {name}.{field}"),
        };
        at = at.next_multiple_of(align);
        most = most.max(align);
        fields.push((field.to_owned(), at, size * count));
        at += size * count;
    }
    (fields, at.next_multiple_of(most))
}

/// What differs between the structs of a header and the host's.
fn differences(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for of in STRUCTS {
        let (fields, size) = layout(text, of.name);
        let own: Vec<Laid> =
            of.fields.iter().map(|f| (f.name.to_owned(), f.offset, f.bytes)).collect();
        if fields != own || size != of.size {
            found.push(format!("{}: {fields:?} of {size}, the host has {own:?}", of.name));
        }
    }
    found
}

#[test]
fn the_header_is_what_the_structs_make() {
    assert!(HEADER == header(), "operands.cuh must be:\n{}", header());
}

#[test]
fn fields_of_the_header_are_where_the_host_has_them() {
    assert_eq!(differences(HEADER), Vec::<String>::new());
}

#[test]
fn a_field_that_moved_in_the_header_is_found() {
    let moved =
        HEADER.replacen("    u32 rows;\n    u32 width;\n", "    u32 width;\n    u32 rows;\n", 1);
    assert_eq!(differences(&moved).len(), 1);
    // What follows is aligned to where it was.
    let narrow = HEADER.replacen("u64 table;", "u32 table;", 1);
    assert_eq!(differences(&narrow).len(), 1);
}

#[test]
fn operands_of_every_kind_fill_an_instruction_and_begin_with_the_kind() {
    for of in STRUCTS.iter().filter(|of| !["Matrix", "RowAt", "Step"].contains(&of.name)) {
        assert_eq!(of.size, size_of::<Instruction>(), "{}", of.name);
        assert_eq!((of.fields[0].name, of.fields[0].offset), ("kind", 0), "{}", of.name);
    }
    assert_ne!(size_of::<Step>(), size_of::<Instruction>());
}
