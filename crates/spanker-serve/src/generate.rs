// SPDX-License-Identifier: Apache-2.0
//! From a request to answers under way: prompts become tokens, schemas become parsers, and the service is asked.

use std::sync::Arc;

use axum::response::Response;
use serde_json::Value;
use spanker_engine::{Ask, Constraint, EngineError, Limits, Sampling, Stop};
use spanker_text::Settings;

use crate::answers::Answers;
use crate::app::{App, Loaded};
use crate::body::Received;
use crate::chat::{Calling, Chat};
use crate::completion::Completion;
use crate::error::{ApiError, Result};
use crate::grammar::Grammar;
use crate::head::Head;
use crate::metrics::Outcome;
use crate::reply::{Reply, reply};
use crate::request::{ChatRequest, CompletionRequest, Form, Prompt, Use, Wanted};
use crate::tools;

/// What a request comes to.
struct Prepared {
    asks: Vec<Ask>,
    /// What becomes of the answers.
    told: Box<dyn Reply>,
    stream: bool,
}

/// The same, once it was taken.
struct Submitted {
    answers: Answers,
    told: Box<dyn Reply>,
    stream: bool,
}

/// What is known of a request before its schema is a parser.
struct Read<R> {
    request: R,
    /// Tokens of each prompt.
    prompts: Vec<Vec<u32>>,
    /// What answers are held to, and the field that says so.
    schema: Option<(Value, &'static str)>,
}

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(app: Arc<App>, body: Received) -> Result<Response> {
    let answered = counted(&app, async {
        let (loaded, read) = app.read(body, read_chat).await?;
        let grammar = grammar(&app, &loaded, read.schema.clone()).await?;
        let prepared = prepare_chat(&loaded, read, grammar.as_ref())?;
        submit(&app, &loaded, prepared)
    });
    let Submitted { answers, told, stream } = answered.await?;
    reply(answers, told, stream).await
}

/// `POST /v1/completions`.
pub(crate) async fn complete(app: Arc<App>, body: Received) -> Result<Response> {
    let answered = counted(&app, async {
        let (loaded, read) = app.read(body, read_completion).await?;
        let grammar = grammar(&app, &loaded, read.schema.clone()).await?;
        let prepared = prepare_completion(&loaded, read, grammar.as_ref())?;
        submit(&app, &loaded, prepared)
    });
    let Submitted { answers, told, stream } = answered.await?;
    reply(answers, told, stream).await
}

/// Counts a request that comes to nothing.
async fn counted<T>(app: &App, work: impl Future<Output = Result<T>>) -> Result<T> {
    let result = work.await;
    if let Err(error) = &result {
        app.metrics.ended(match error.status.as_u16() {
            429 => Outcome::Refused,
            400..=499 => Outcome::Invalid,
            _ => Outcome::Unavailable,
        });
    }
    result
}

fn submit(app: &App, loaded: &Loaded, prepared: Prepared) -> Result<Submitted> {
    let Prepared { asks, told, stream } = prepared;
    let seen = (&app.slots, &app.metrics);
    let answers = Answers::submit(&*loaded.backend, asks, seen, app.options.limits.pieces)?;
    Ok(Submitted { answers, told, stream })
}

/// What holds answers to a schema, made beside the threads that read requests.
async fn grammar(
    app: &Arc<App>,
    loaded: &Arc<Loaded>,
    schema: Option<(Value, &'static str)>,
) -> Result<Option<Grammar>> {
    let Some((schema, field)) = schema else { return Ok(None) };
    let permit = app.schemas.acquire().await;
    let _permit = permit.map_err(|_| ApiError::ending())?;
    let loaded = Arc::clone(loaded);
    App::aside(move || {
        let built = loaded.grammars.build(&schema);
        built.map(Some).map_err(|said| {
            ApiError::field(field, format!("no answer can be held to the schema: {said}"))
        })
    })
    .await
}

fn read_chat(loaded: &Loaded, body: Value) -> Result<Read<ChatRequest>> {
    let mut request = ChatRequest::of(&body, &loaded.served)?;
    let messages = std::mem::take(&mut request.messages);
    let (messages, tools) = loaded.abilities.prepare(messages, &request.tools.shown());
    let wrong = |error: EngineError| match error {
        EngineError::Text(said) => ApiError::field("messages", said),
        other => other.into(),
    };
    let prompt = loaded.model().chat(&messages, &tools).map_err(wrong)?;
    if prompt.tokens.is_empty() {
        return Err(ApiError::field("messages", "the chat template makes no text of them"));
    }
    check_length(loaded, "messages", prompt.tokens.len())?;
    let schema = match (&request.wanted.form, tools::schema(&request.tools)) {
        (_, Some(schema)) => Some((schema, "tools")),
        (Form::Schema(schema), None) => Some((schema.clone(), "response_format")),
        (Form::Text, None) => None,
    };
    Ok(Read { request, prompts: vec![prompt.tokens], schema })
}

fn prepare_chat(
    loaded: &Arc<Loaded>,
    read: Read<ChatRequest>,
    grammar: Option<&Grammar>,
) -> Result<Prepared> {
    let Read { request, prompts, .. } = read;
    let ChatRequest { tools, chances, wanted, .. } = request;
    let names: Vec<String> = tools.callable().iter().map(|tool| tool.name.clone()).collect();
    let calling = (tools.choice != Use::None).then(|| Calling {
        style: loaded.abilities.style(),
        forced: tools.choice == Use::Required,
        parallel: tools.parallel && tools.choice != Use::Required,
        names,
    });
    let objects = ("chatcmpl", ["chat.completion", "chat.completion.chunk"]);
    let named = (Arc::clone(loaded.model()), loaded.name().to_owned());
    let head = Head::new(objects, named, &wanted, chances.is_some());
    let chat = Chat::new(head, calling, wanted.answers, prompts[0].len());
    let asks = asks(&wanted, prompts, chances, grammar)?;
    Ok(Prepared { asks, told: Box::new(chat), stream: wanted.stream })
}

fn read_completion(loaded: &Loaded, body: Value) -> Result<Read<CompletionRequest>> {
    let request = CompletionRequest::of(&body, &loaded.served)?;
    let model = loaded.model();
    let tokenizer = model.tokenizer();
    let mut prompts = Vec::with_capacity(request.prompts.len());
    for prompt in &request.prompts {
        let tokens = match prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) => tokenizer.encode(text, tokenizer.add_bos(), true),
        };
        if tokens.is_empty() {
            return Err(ApiError::field("prompt", "it has no tokens"));
        }
        check_length(loaded, "prompt", tokens.len())?;
        prompts.push(tokens);
    }
    let schema = match &request.wanted.form {
        Form::Schema(schema) => Some((schema.clone(), "response_format")),
        Form::Text => None,
    };
    Ok(Read { request, prompts, schema })
}

fn prepare_completion(
    loaded: &Arc<Loaded>,
    read: Read<CompletionRequest>,
    grammar: Option<&Grammar>,
) -> Result<Prepared> {
    let Read { request, prompts, .. } = read;
    let CompletionRequest { prompts: texts, echo, chances, wanted } = request;
    let tokenizer = loaded.model().tokenizer();
    let mut told = Vec::new();
    for (tokens, prompt) in prompts.iter().zip(texts) {
        let text = match prompt {
            _ if !echo => String::new(),
            Prompt::Text(text) => text,
            Prompt::Tokens(tokens) => tokenizer.decode(&tokens),
        };
        told.extend(std::iter::repeat_n((tokens.len(), text), wanted.answers));
    }
    let objects = ("cmpl", ["text_completion"; 2]);
    let named = (Arc::clone(loaded.model()), loaded.name().to_owned());
    let head = Head::new(objects, named, &wanted, chances.is_some());
    let completion = Completion::new(head, told, wanted.answers);
    let asks = asks(&wanted, prompts, chances, grammar)?;
    Ok(Prepared { asks, told: Box::new(completion), stream: wanted.stream })
}

/// Whether a prompt leaves room for an answer.
fn check_length(loaded: &Loaded, field: &str, tokens: usize) -> Result<()> {
    let context = loaded.context();
    if tokens < context {
        return Ok(());
    }
    let what = format!("{tokens} tokens, and the context has room for {context} with the answer");
    Err(ApiError::too_long(field, what))
}

/// The asks of a request: every answer has a seed of its own.
fn asks(
    wanted: &Wanted,
    prompts: Vec<Vec<u32>>,
    chances: Option<usize>,
    grammar: Option<&Grammar>,
) -> Result<Vec<Ask>> {
    let mut asks = Vec::with_capacity(prompts.len() * wanted.answers);
    for prompt in prompts {
        for answer in 0..wanted.answers {
            let seed = wanted.settings.seed.wrapping_add(answer as u64);
            let sampling = Sampling::new(Settings { seed, ..wanted.settings })?;
            let limits = Limits {
                tokens: wanted.tokens,
                ignore_end: wanted.ignore_end,
                stops: wanted.stops.clone(),
                keep_logits: false,
                stop: Stop::default(),
            };
            let mut ask = Ask::new(prompt.clone(), sampling, limits);
            ask.chances = chances;
            ask.bias.clone_from(&wanted.bias);
            ask.reuse = wanted.reuse;
            ask.constraint = grammar.map(|one| Box::new(one.restart()) as Box<dyn Constraint>);
            asks.push(ask);
        }
    }
    Ok(asks)
}
