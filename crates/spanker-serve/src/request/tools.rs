// SPDX-License-Identifier: Apache-2.0
//! The tools of a request, and whether they have to be called.

use serde_json::Value;

use super::fields::Fields;
use super::tables::{self, MOST_NAME, MOST_TOOLS};
use crate::error::Result;

/// Whether tools are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// They are not.
    None,
    /// The model decides.
    Auto,
    /// One is.
    Required,
}

/// A tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// The schema of what it is called with; nothing for any object.
    pub(crate) parameters: Option<Value>,
    /// As the request has it.
    pub(crate) json: Value,
}

/// The tools of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tools {
    pub(crate) list: Vec<Tool>,
    pub(crate) choice: Use,
    /// The one that is called, if a request says which.
    pub(crate) named: Option<usize>,
    /// Whether several may be called at a time.
    pub(crate) parallel: bool,
}

impl Tools {
    pub(super) fn of(fields: &Fields<'_>) -> Result<Tools> {
        let list = list(fields)?;
        let parallel = fields.flag(&tables::PARALLEL_TOOL_CALLS)?.unwrap_or(true);
        let (choice, named) = choice(fields, &list)?;
        if list.is_empty() && choice == Use::Required {
            return Err(fields.wrong("tool_choice", "a tool is to be called, and tools has none"));
        }
        let choice = if list.is_empty() { Use::None } else { choice };
        Ok(Tools { list, choice, named, parallel })
    }

    /// The tools as templates are shown them: none if none is to be called.
    pub(crate) fn shown(&self) -> Vec<Value> {
        match self.choice {
            Use::None => Vec::new(),
            _ => self.list.iter().map(|tool| tool.json.clone()).collect(),
        }
    }

    /// The tools that may be called.
    pub(crate) fn callable(&self) -> &[Tool] {
        match (self.choice, self.named) {
            (Use::None, _) => &[],
            (_, Some(at)) => &self.list[at..=at],
            _ => &self.list,
        }
    }
}

/// The tools alone.
pub(super) fn list(fields: &Fields<'_>) -> Result<Vec<Tool>> {
    let list = fields.list("tools")?.unwrap_or_default();
    if list.len() > MOST_TOOLS {
        return Err(fields.wrong("tools", format!("{} tools: at most {MOST_TOOLS}", list.len())));
    }
    let mut tools: Vec<Tool> = Vec::new();
    for (at, value) in list.iter().enumerate() {
        let tool = Fields::of(value, format!("tools[{at}]"))?;
        check_type(&tool, true)?;
        let function = Fields::of(tool.required("function")?, tool.path("function"))?;
        let name = name(&function)?;
        function.text("description")?;
        if tools.iter().any(|other| other.name == name) {
            return Err(function.wrong("name", format!("'{name}' is the name of another tool")));
        }
        let parameters = match function.get("parameters") {
            Some(Value::Object(fields)) if fields.is_empty() => None,
            Some(value @ Value::Object(_)) => Some(value.clone()),
            Some(other) => return Err(function.expected("parameters", "a JSON schema", other)),
            None => None,
        };
        tools.push(Tool { name, parameters, json: value.clone() });
    }
    Ok(tools)
}

/// Functions are all that can be called.
pub(super) fn check_type(fields: &Fields<'_>, required: bool) -> Result<()> {
    match fields.get("type") {
        None if required => Err(fields.wrong("type", "missing")),
        None => Ok(()),
        Some(value) if value == "function" => Ok(()),
        Some(other) => Err(fields.expected("type", "function", other)),
    }
}

/// The name of a function.
pub(super) fn name(fields: &Fields<'_>) -> Result<String> {
    let value = fields.required("name")?;
    let allowed = |one: char| one.is_ascii_alphanumeric() || "_.-".contains(one);
    let fits = |name: &&str| (1..=MOST_NAME).contains(&name.len()) && name.chars().all(allowed);
    match value.as_str().filter(fits) {
        Some(name) => Ok(name.to_owned()),
        None => {
            let expected = format!("1 to {MOST_NAME} letters, digits and _.-");
            Err(fields.expected("name", &expected, value))
        }
    }
}

fn choice(fields: &Fields<'_>, tools: &[Tool]) -> Result<(Use, Option<usize>)> {
    let field = tables::TOOL_CHOICE.name;
    let Some(value) = fields.get(field) else { return Ok((Use::Auto, None)) };
    match value {
        Value::String(word) => match word.as_str() {
            "none" => Ok((Use::None, None)),
            "auto" => Ok((Use::Auto, None)),
            "required" => Ok((Use::Required, None)),
            _ => Err(fields.expected(field, "none, auto, required or a function", value)),
        },
        Value::Object(_) => {
            let choice = Fields::of(value, fields.path(field))?;
            check_type(&choice, true)?;
            let function = Fields::of(choice.required("function")?, choice.path("function"))?;
            let name = name(&function)?;
            match tools.iter().position(|tool| tool.name == name) {
                Some(at) => Ok((Use::Required, Some(at))),
                None => Err(function.wrong("name", format!("'{name}' is not among the tools"))),
            }
        }
        _ => Err(fields.expected(field, "none, auto, required or a function", value)),
    }
}
