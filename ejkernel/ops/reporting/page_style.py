"""The style and the script of a page: nothing is loaded, and without the script everything can still be read."""

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#57606a;--line:#d0d7de;--paper:#fff;--soft:#f3f5f7;--good:#1a7f37;
--mark:#0860ca;--bad:#b42318;--warn:#8a5a00;--other:#8c959f}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9aa5b1;--line:#3a424c;--paper:#0f1318;--soft:#1a2028;
--good:#4ac26b;--mark:#6cb0ff;--bad:#ff8f86;--warn:#e0b250;--other:#6e7781}}
*{box-sizing:border-box}body{margin:0 auto;max-width:70rem;padding:1rem;font:16px/1.5 system-ui,sans-serif;
color:var(--ink);background:var(--paper)}h1{font-size:1.6rem;margin:.2em 0}h2{font-size:1.25rem;margin:2em 0 .4em}
h3{font-size:1.05rem;margin:2em 0 .3em;overflow-wrap:anywhere;border-top:1px solid var(--line);padding-top:1em}
h4{font-size:.95rem;margin:1.1em 0 .2em}p{margin:.4em 0;overflow-wrap:anywhere}a{color:var(--mark)}
.t{overflow-x:auto;max-width:100%}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--dim);padding:.2em 0}
th,td{text-align:left;vertical-align:top;padding:.25em .7em .25em 0;border-bottom:1px solid var(--line)}
td[data-v]{white-space:nowrap}
th button{text-align:left;font:inherit;background:none;border:0;color:inherit;padding:0;cursor:pointer;
text-decoration:underline dotted}code,.c{font:.85em/1.5 ui-monospace,Menlo,Consolas,monospace}.d{color:var(--dim)}
.faster{color:var(--good)}.noisy,.changed{color:var(--warn)}.unmeasured{color:var(--bad)}
svg{width:100%;max-width:44rem;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
.e{text-anchor:end}path{fill:none}.g{stroke:var(--line)}.o{stroke:var(--other)}.w{stroke:var(--mark);stroke-width:2.5}
.h{stroke:var(--ink);stroke-dasharray:5 3;stroke-width:1.5}.k{stroke:var(--bad);stroke-width:1.5}
.r{stroke:var(--dim);stroke-width:2}circle.w{fill:var(--mark)}.o,.w,.h{stroke-linecap:round;stroke-linejoin:round}
path.o,path.w,path.h{marker:url(#dot)}.x{marker:url(#cross)}.bar{display:inline-block;height:.7em;background:var(--mark);min-width:1px}
.m td{text-align:right;padding:.25em .6em}
.k0,.k1,.k2,.k3{background:color-mix(in srgb,var(--mark) var(--s),transparent)}
.k0{--s:55%}.k1{--s:40%}.k2{--s:26%}.k3{--s:12%}
.n{background:var(--soft);padding:.6em .8em;border-radius:6px;margin:.8em 0}pre{overflow-x:auto;background:var(--soft);
padding:.6em .8em;border-radius:6px;font-size:.85rem}input{font:inherit;padding:.3em .5em;width:100%;max-width:24rem}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);padding:.2em .5em;border-radius:4px;
font-size:.8rem;max-width:18rem;display:none}[hidden]{display:none}
@media(max-width:32rem){body{padding:.6rem;font-size:15px}}
@media print{body{max-width:none;font-size:10pt}.noprint,#tip{display:none!important}section{break-inside:avoid}
.t{overflow:visible}a{color:inherit}}
"""

SCRIPT = """
(function(){var d=document,tip=d.getElementById("tip");
d.addEventListener("pointermove",function(e){var t=e.target.closest&&e.target.closest("[data-t]");
if(!t){tip.style.display="none";return}tip.textContent=t.getAttribute("data-t");tip.style.display="block";
tip.style.left=Math.max(0,Math.min(e.clientX+12,innerWidth-tip.offsetWidth-4))+"px";
tip.style.top=Math.max(0,Math.min(e.clientY+14,innerHeight-tip.offsetHeight-4))+"px"});
function value(row,i){var c=row.cells[i];if(!c)return"";var v=c.getAttribute("data-v");
return v===null?c.textContent.trim():v===""?Infinity:+v}
d.querySelectorAll("table.s").forEach(function(table){var heads=table.tHead.rows[0].cells;
Array.prototype.forEach.call(heads,function(th,i){var b=d.createElement("button");b.type="button";
b.textContent=th.textContent;th.textContent="";th.appendChild(b);b.addEventListener("click",function(){
var up=th.getAttribute("aria-sort")!=="ascending",body=table.tBodies[0];
Array.prototype.forEach.call(heads,function(o){o.removeAttribute("aria-sort")});
th.setAttribute("aria-sort",up?"ascending":"descending");
Array.prototype.slice.call(body.rows).sort(function(a,b){var x=value(a,i),y=value(b,i);
if(typeof x==="number"&&typeof y==="number"){if(x===y)return 0;if(x===Infinity)return 1;if(y===Infinity)return -1;
return up?x-y:y-x}return(up?1:-1)*String(x).localeCompare(String(y))}).forEach(function(r){body.appendChild(r)})})})});
var box=d.getElementById("filter");if(!box)return;box.closest("p").hidden=false;
var said=d.getElementById("found");
box.addEventListener("input",function(){var words=box.value.toLowerCase().split(/\\s+/),n=0;
d.querySelectorAll("tr[data-f]").forEach(function(e){var text=e.getAttribute("data-f");
var fits=words.every(function(w){return text.indexOf(w)>=0});e.hidden=!fits;n+=fits;
var link=e.querySelector("a"),part=link&&d.getElementById(link.hash.slice(1));if(part)part.hidden=!fits});
said.textContent=box.value?n+" calls fit":""})})();
"""

# A dot for each sample, drawn once and used by every line.
MARKER = (
    '<svg aria-hidden="true" width="0" height="0" style="position:absolute"><defs><marker id="dot" viewBox="0 0 6 6" '
    'refX="3" refY="3" markerWidth="4" markerHeight="4" markerUnits="userSpaceOnUse"><circle cx="3" cy="3" r="3" '
    'fill="context-stroke"/></marker><marker id="cross" viewBox="0 0 10 10" refX="5" refY="5" markerWidth="10" '
    'markerHeight="10" markerUnits="userSpaceOnUse"><path class="k" d="M1 1l8 8m0-8l-8 8"/></marker></defs></svg>'
)
