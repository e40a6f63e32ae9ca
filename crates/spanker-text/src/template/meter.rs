// SPDX-License-Identifier: Apache-2.0
//! What a template may make: every text, list and map that it computes is paid for by its length as text, from one
//! budget. Fuel alone bounds steps and not memory: sixty steps that double a text would take all of it.
//!
//! The engine has no hook for that, so its instructions that make values are replaced, one for one, by calls of
//! functions with names that no template can write. Filters and methods whose results may be longer than their
//! arguments pay beforehand. What is printed pays too, also into variables.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::json::Style;
use super::print::{print, printed};

/// The deepest that lists and maps are within each other: what walks through them is recursive.
const DEEPEST: usize = 200;
/// The widest that texts are indented.
pub(super) const WIDEST: usize = 100;
/// What a value takes beside its text, about.
const EACH: usize = 32;

/// What is left of a budget of bytes.
#[derive(Debug, Clone)]
pub(super) struct Meter(Arc<AtomicUsize>);

/// The reason of an error where the budget is gone.
pub(super) const SPENT: &str = "its text is too long";

pub(super) fn refused() -> Error {
    Error::new(ErrorKind::WriteFailure, SPENT)
}

/// What is left of `left` after a value's length as text. Lists are walked through here and not by their own printing,
/// which goes through all items even when nobody takes them.
fn without(value: &Value, left: usize, deep: usize) -> Option<usize> {
    let left = left.checked_sub(EACH)?;
    if deep > DEEPEST {
        return None;
    }
    match value.kind() {
        ValueKind::String => left.checked_sub(value.as_str().map_or(0, str::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            // Lengths of lists that are made when somebody looks may be anything.
            if value.len().is_some_and(|length| length.saturating_mul(EACH) > left) {
                return None;
            }
            let map = value.kind() == ValueKind::Map;
            let mut left = left;
            for item in value.try_iter().ok()? {
                left = without(&item, left, deep + 1)?;
                if map {
                    left = without(&value.get_item(&item).ok()?, left, deep + 1)?;
                }
            }
            Some(left)
        }
        // Namespaces, macros and the like print what they hold; numbers are short.
        ValueKind::Plain => left.checked_sub(EACH),
        _ => Some(left),
    }
}

impl Meter {
    pub(super) fn new(bytes: usize) -> Meter {
        Meter(Arc::new(AtomicUsize::new(bytes)))
    }

    /// Pays for so many bytes.
    fn spend(&self, bytes: usize) -> Result<(), Error> {
        let less = |left: usize| left.checked_sub(bytes);
        let spent = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        spent.map(drop).map_err(|_| refused())
    }

    /// What a value takes, if that can be paid for.
    fn length(&self, value: &Value) -> Result<usize, Error> {
        let left = self.0.load(Ordering::Relaxed);
        without(value, left, 0).map(|rest| left - rest).ok_or_else(refused)
    }

    /// Pays for a value.
    fn pay(&self, value: Value) -> Result<Value, Error> {
        self.spend(self.length(&value)?)?;
        Ok(value)
    }

    /// Pays for the values that something is made of.
    fn pay_all(&self, values: &[Value]) -> Result<(), Error> {
        values.iter().try_for_each(|value| self.spend(self.length(value)?))
    }

    /// Replaces instructions that make values. `names` has what [`names`] found, in its order. Literals are paid for
    /// here, because the compiler multiplies and joins them.
    pub(super) fn rewrite<'s>(
        &self,
        instructions: &mut Instructions<'s>,
        names: &'s [String],
    ) -> Result<(), Error> {
        let mut next = names.iter();
        for at in 0.. {
            let Some(instruction) = instructions.get_mut(at) else { break };
            let call = match instruction {
                Instruction::LoadConst(value) => {
                    self.pay(value.clone())?;
                    continue;
                }
                Instruction::Add => ("+", Some(2)),
                Instruction::StringConcat => ("~", Some(2)),
                Instruction::Mul => ("*", Some(2)),
                Instruction::Slice => ("[:]", Some(4)),
                Instruction::BuildList(Some(count)) => match u16::try_from(*count) {
                    Ok(count) => ("[]", Some(count)),
                    Err(_) => continue,
                },
                Instruction::BuildMap(pairs) => match u16::try_from(*pairs * 2) {
                    Ok(count) => ("{}", Some(count)),
                    Err(_) => continue,
                },
                Instruction::BuildKwargs(pairs) => match u16::try_from(*pairs * 2) {
                    Ok(count) => ("{=}", Some(count)),
                    Err(_) => continue,
                },
                Instruction::ApplyFilter(_, count, _) | Instruction::CallMethod(_, count) => {
                    let Some(name) = next.next() else { continue };
                    (name.as_str(), *count)
                }
                _ => continue,
            };
            *instruction = Instruction::CallFunction(call.0, call.1);
        }
        Ok(())
    }

    /// Gives an environment the functions, filters and methods that pay.
    pub(super) fn install(&self, environment: &mut Environment<'_>, names: &[String]) {
        let meter = |name: &'static str, environment: &mut Environment<'_>| {
            let meter = self.clone();
            environment.add_function(name, move |args: Rest<Value>| meter.operate(name, &args));
        };
        for name in ["+", "~", "*", "[:]", "[]", "{}", "{=}"] {
            meter(name, environment);
        }
        for name in names {
            let (meter, own) = (self.clone(), name.clone());
            environment.add_function(
                name.clone(),
                move |state: &State<'_, '_>, args: Rest<Value>| {
                    let called =
                        match (own.strip_prefix('|'), own.strip_prefix('.'), args.split_first()) {
                            (Some(filter), ..) => applied(state, filter, &args),
                            (_, Some(method), Some((value, args))) => {
                                value.call_method(state, method, args)
                            }
                            _ => Err(Error::from(ErrorKind::UnknownMethod)),
                        };
                    called.and_then(|value| meter.pay(value))
                },
            );
        }
        // What these print has no bound, and no conversation needs them.
        environment.remove_global("debug");
        environment.remove_filter("format");
        environment.remove_filter("pprint");
        self.install_growing(environment);
        let meter = self.clone();
        environment.set_formatter(move |out, _, value| {
            meter.spend(meter.length(value)?)?;
            print(out, value).map_err(|_| refused())
        });
    }

    /// Filters and methods whose result may be longer than what they get.
    fn install_growing(&self, environment: &mut Environment<'_>) {
        let meter = self.clone();
        environment.add_filter("replace", move |text: String, old: String, new: String| {
            meter.replaced(&text, &old, &new)
        });
        environment.add_filter("string", |text: Value| match text.kind() {
            ValueKind::String => text,
            _ => Value::from(printed(&text)),
        });
        let meter = self.clone();
        environment.add_filter("join", move |items: Value, between: Option<String>| {
            meter.joined(&items, between.as_deref().unwrap_or_default())
        });
        let meter = self.clone();
        environment.add_filter("indent", move |text: Value, args: Rest<Value>| {
            let text = text.to_string();
            let (args, named) = minijinja::value::from_args::<(&[Value], Kwargs)>(&args)?;
            let width = match args.first() {
                Some(width) => width.as_usize(),
                None => named.get::<Option<usize>>("width")?.or(Some(4)),
            };
            let flag = |at: usize, name: &str| match args.get(at) {
                Some(value) => Ok(value.is_true()),
                None => named.get::<Option<bool>>(name).map(Option::unwrap_or_default),
            };
            let (first, blank) = (flag(1, "first")?, flag(2, "blank")?);
            let width = width.filter(|width| *width <= WIDEST).ok_or_else(refused)?;
            meter.spend(text.len().saturating_add(text.lines().count() * width))?;
            Ok(indented(&text, width, first, blank))
        });
        let meter = self.clone();
        environment.add_filter("tojson", move |value: &Value, args: Rest<Value>| {
            let (indent, named) = minijinja::value::from_args::<(Option<Value>, Kwargs)>(&args)?;
            let style = Style::of(indent, &named)?;
            named.assert_all_used()?;
            style.write(value, |bytes| meter.spend(bytes))
        });
        let meter = self.clone();
        environment.set_unknown_method_callback(move |state, value, name, args| {
            match (name, value.as_str(), args) {
                ("format", ..) => Err(Error::from(ErrorKind::UnknownMethod)),
                ("replace", Some(text), [old, new]) => {
                    meter.replaced(text, &old.to_string(), &new.to_string())
                }
                ("join", Some(between), [items]) => meter.joined(items, between),
                _ => unknown_method_callback(state, value, name, args),
            }
        });
    }

    /// One of the engine's operators.
    fn operate(&self, name: &str, args: &[Value]) -> Result<Value, Error> {
        match (name, args) {
            ("+", [a, b]) => {
                self.pay_all(args)?;
                match (a.as_str(), b.as_str()) {
                    (Some(a), Some(b)) => Ok(Value::from([a, b].concat())),
                    _ => evaluated("a + b", args),
                }
            }
            ("~", [a, b]) => {
                self.pay_all(args)?;
                Ok(Value::from(printed(a) + &printed(b)))
            }
            ("*", [a, b]) => {
                for (value, times) in [(a, b), (b, a)] {
                    if !matches!(value.kind(), ValueKind::Number | ValueKind::Bool) {
                        let times = times.as_usize().unwrap_or(0);
                        let length = self.length(value)?;
                        self.spend(length.saturating_mul(times))?;
                    }
                }
                evaluated("a * b", args)
            }
            ("[:]", [..]) if args.len() == 4 => self.pay(evaluated("a[b:c:d]", args)?),
            ("[]", items) => self.pay(Value::from(items.to_vec())),
            ("{}", pairs) => self.pay(pairs.chunks_exact(2).map(pair).collect::<Value>()),
            (_, pairs) => {
                self.pay_all(pairs)?;
                let named = pairs.chunks_exact(2).map(|two| (two[0].to_string(), two[1].clone()));
                Ok(Value::from(named.collect::<Kwargs>()))
            }
        }
    }

    fn replaced(&self, text: &str, old: &str, new: &str) -> Result<Value, Error> {
        let times = text.matches(old).count();
        self.spend(text.len().saturating_add(times.saturating_mul(new.len())))?;
        Ok(Value::from(text.replace(old, new)))
    }

    fn joined(&self, items: &Value, between: &str) -> Result<Value, Error> {
        let mut text = String::new();
        for (at, item) in items.try_iter()?.enumerate() {
            let between = if at == 0 { "" } else { between };
            self.spend(self.length(&item)?.saturating_add(between.len()))?;
            // Texts can be written to without an end.
            let _ = write!(text, "{between}{item}");
        }
        Ok(Value::from(text))
    }
}

fn applied(state: &State<'_, '_>, filter: &str, args: &[Value]) -> Result<Value, Error> {
    state.apply_filter(filter, args).map_err(|error| match (error.kind(), error.detail()) {
        (ErrorKind::UnknownFilter, None) => {
            Error::new(ErrorKind::UnknownFilter, format!("filter {filter} is unknown"))
        }
        _ => error,
    })
}

/// A key with its value, as they lie on the stack.
fn pair(two: &[Value]) -> (Value, Value) {
    (two[0].clone(), two[1].clone())
}

/// What the engine itself makes of an expression over `a`, `b`, `c` and `d`.
fn evaluated(expression: &str, args: &[Value]) -> Result<Value, Error> {
    let names = ["a", "b", "c", "d"].map(Value::from);
    let environment = Environment::empty();
    let root: Value = names.into_iter().zip(args.iter().cloned()).collect();
    environment.compile_expression(expression)?.eval(root)
}

fn indented(text: &str, width: usize, first: bool, blank: bool) -> Value {
    let mut out = String::new();
    let text = text.strip_suffix('\n').unwrap_or(text);
    for (at, line) in text.split('\n').enumerate() {
        let before = if at == 0 { "" } else { "\n" };
        let flush = (line.is_empty() && !blank) || (at == 0 && !first);
        let width = if flush { 0 } else { width };
        // Texts can be written to without an end.
        let _ = write!(out, "{before}{:width$}{line}", "");
    }
    Value::from(out)
}

/// The names of the functions that stand for the filters and methods of some instructions, in their order.
pub(super) fn names(instructions: &Instructions<'_>) -> Vec<String> {
    let name = |at: u32| match instructions.get(at)? {
        Instruction::ApplyFilter(name, ..) => Some(format!("|{name}")),
        Instruction::CallMethod(name, _) => Some(format!(".{name}")),
        _ => Some(String::new()),
    };
    (0..).map_while(name).filter(|name| !name.is_empty()).collect()
}

/// The longest text that one instruction prints by itself.
pub(super) fn longest_raw(instructions: &Instructions<'_>) -> usize {
    let raw = |at: u32| match instructions.get(at)? {
        Instruction::EmitRaw(text) => Some(text.len()),
        _ => Some(0),
    };
    (0..).map_while(raw).max().unwrap_or(0)
}
