// llama.cpp as a peer of bench/engine.py, through node-llama-cpp: one JSON object per line in, one out.
//
//     node bench/llamacpp.mjs FOLDER MODEL.gguf THREADS      FOLDER: where `npm install node-llama-cpp` ran
//
// {"batch": sequences, "context": tokens, "steps": tokens, "chunk": tokens} is answered with {"seconds": s}: of a prompt to
// its first token if there are no steps, else of so many tokens of each sequence, each beside a prompt of `chunk` tokens if
// that is not 0. Contexts are filled outside the clock.
import {mkdtempSync, rmSync} from "node:fs";
import {tmpdir} from "node:os";
import {join} from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, file, threads] = process.argv.slice(2);
const entry = pathToFileURL(join(folder, "node_modules", "node-llama-cpp", "dist", "index.js"));
const {getLlama} = await import(entry);
const num_threads = Number(threads);
const llama = await getLlama({gpu: false, build: "never", maxThreads: num_threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
console.log(JSON.stringify({ready: true}));

const scratch = mkdtempSync(join(tmpdir(), "llamacpp-"));
const tokens = (count) => Array.from({length: count}, (_, i) => 100 + (i * 7919) % 40000);
const now = () => Number(process.hrtime.bigint()) / 1e9;

function open(sequences, tokens_each) {
    return model.createContext({
        sequences, contextSize: tokens_each, batchSize: Math.max(512, sequences),
        threads: {ideal: num_threads, min: num_threads}, flashAttention: true, ignoreMemorySafetyChecks: true
    });
}

// Resolves when the sequence has given `count` tokens after `input`.
async function generate(sequence, input, count) {
    let left = count;
    for await (const _ of sequence.evaluate(input, {temperature: 0, yieldEogToken: true}))
        if (--left === 0) break;
    if (left > 0) throw new Error(`${count - left} tokens instead of ${count}`);
}

async function prefill(num_tokens) {
    const context = await open(1, num_tokens + 8);
    const start = now();
    await generate(context.getSequence(), tokens(num_tokens), 1);
    const seconds = now() - start;
    await context.dispose();
    return seconds;
}

async function decode({batch, context: num_tokens, steps, chunk}) {
    const context = await open(batch + (chunk ? 1 : 0), Math.max(num_tokens + steps, chunk) + 8);
    const sequences = Array.from({length: batch}, () => context.getSequence());
    await sequences[0].evaluateWithoutGeneratingNewTokens(tokens(num_tokens - 1));
    const state = join(scratch, "state");
    if (batch > 1) {
        await sequences[0].saveStateToFile(state);
        for (const sequence of sequences.slice(1)) await sequence.loadStateFromFile(state, {acceptRisk: true});
    }
    await Promise.all(sequences.map((sequence) => generate(sequence, [100], 1)));
    const start = now();
    if (chunk) await decodeBesidePrompts(sequences, context.getSequence(), steps, chunk);
    else await Promise.all(sequences.map((sequence) => generate(sequence, [101], steps)));
    const seconds = now() - start;
    await context.dispose();
    return seconds;
}

async function decodeBesidePrompts(sequences, prompt, steps, chunk) {
    for (let i = 0; i < steps; i++) {
        await Promise.all([
            ...sequences.map((sequence) => generate(sequence, [101], 1)),
            generate(prompt, tokens(chunk), 1)
        ]);
        await prompt.clearHistory();
    }
}

for await (const line of createInterface({input: process.stdin})) {
    const asked = JSON.parse(line);
    let answer;
    try {
        answer = {seconds: asked.steps ? await decode(asked) : await prefill(asked.context)};
    } catch (error) {
        answer = {error: String(error)};
    }
    console.log(JSON.stringify(answer));
}
rmSync(scratch, {recursive: true, force: true});
process.exit(0);
